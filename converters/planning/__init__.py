"""What a conversion will do: options, what is refused, the steps, and the plan made of them."""
