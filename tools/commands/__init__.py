"""What each command runs; imported when it is called."""
