"""What an answer must look like and how it is read: grammars, tools, thinking, stop strings."""
