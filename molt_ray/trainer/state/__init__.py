"""What leaves the ranks: weights by checkpoint name, the Hugging Face export, resumable checkpoints. Runs on the ranks."""
