"""Training: the formulas (``algorithms``, needs only torch) and the trainers that use them.

This module imports nothing, so ``import clawgym.trainers`` works without torch.
"""
