"""The backend that pytest's `--backend` names; empty without the option."""

backend_name = ""
