"""What a network is, as checked records: sizes, positions, pooling, pictures, recommended sampling."""
