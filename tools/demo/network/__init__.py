"""The demo model in PyTorch, and its form as a checkpoint."""
