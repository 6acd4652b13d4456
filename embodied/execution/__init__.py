"""The executor, the session it works in, and the assignment of workers to devices."""
