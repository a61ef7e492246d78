"""What each engine does with a directory: its rules written again, apart from the writers."""
