"""What other bits, threads or devices would change, predicted from a profile."""
