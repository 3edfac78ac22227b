"""From one layout of a tensor to another, in the fewest bytes."""
