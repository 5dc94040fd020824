"""Pictures become the patches that a vision tower reads, and take their places in a prompt."""
