"""Where the commands look for a running server unless told."""

DEFAULT_URL = "http://127.0.0.1:8321"
