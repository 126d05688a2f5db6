"""What datasets say of items: their texts and columns, and the vectors that are made of them."""
