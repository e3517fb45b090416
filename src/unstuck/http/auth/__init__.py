"""Who may come in: the Host that was asked for, the token or login, the origin of unsafe requests, limits."""
