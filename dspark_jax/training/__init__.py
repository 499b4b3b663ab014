"""Fine-tuning the drafter: blocks and masks, losses, the step, the loop and its checkpoints."""
