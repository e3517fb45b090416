#!/bin/sh
# Make a virtual environment with atheris, and print the Python to fuzz with: that one, or the given one where atheris cannot
# be installed (it has wheels for few versions of Python and for few platforms).
#   tests/bring_atheris.sh FOLDER OTHER_PYTHON
folder="$1"
other="$2"
if [ ! -e "$folder/.installed" ]; then
    python="$(command -v python3.11 || command -v python3)"
    log="$(mktemp)"
    if "$python" -m venv "$folder" >"$log" 2>&1 \
        && "$folder/bin/python" -m pip install --quiet --disable-pip-version-check atheris -e '.[http,mdp]' >>"$log" 2>&1 \
        && "$folder/bin/python" -c 'import atheris' >>"$log" 2>&1; then
        touch "$folder/.installed"
    else
        echo "atheris cannot be installed here ($("$python" --version 2>&1) on $(uname -m)): $(tail -n 1 "$log")" >&2
        echo "Fuzzing with mutations of known inputs instead, which nothing guides." >&2
        rm -f "$log"
        echo "$other"
        exit 0
    fi
    rm -f "$log"
fi
echo "$folder/bin/python"
