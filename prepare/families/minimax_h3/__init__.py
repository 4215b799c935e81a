"""Recipe of MiniMax-H3: published tensors of both layouts, and what a prepared directory keeps of them."""
