"""Other ways to an uncertainty, to compare with."""
