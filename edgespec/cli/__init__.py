"""The command line: one module per command, no logic; `app.main` is the entry point."""
