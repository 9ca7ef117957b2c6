"""The command line: words, progress and exit codes."""
