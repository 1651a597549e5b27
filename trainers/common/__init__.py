"""What the local trainer and the verl trainer share."""
