"""What people see on a screen of their own: popups, and the small application `unstuck popups`.

Everything in here but the summaries needs Qt; nothing outside is loaded with it.
"""

DESKTOP_INSTALL_HINT = "Popups need more packages: pip install 'unstuck[qt]'."
