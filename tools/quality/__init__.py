"""What quantization lost: predictions over windows of text, and tables and charts of them."""
