"""Commands of ``polydraft``, one file a group. Heavy modules are imported when a command runs."""
