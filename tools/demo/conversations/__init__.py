"""What the demo model is to learn: conversations, one module for each thing that is asked of it. data.py mixes them."""
