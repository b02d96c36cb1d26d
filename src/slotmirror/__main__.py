"""`python -m slotmirror` is the command line."""

from slotmirror.cli import app

if __name__ == "__main__":
    app(prog_name="slotmirror")
