"""The one exception that users are meant to read."""


class InputError(ValueError):
    """Bad input: one line that says what was given, what was expected, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """
