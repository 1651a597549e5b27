"""Training: the formulas (``algorithms``, torch only) and the engines that use them.

Nothing is imported here: ``import clawgym.trainers`` needs no torch.
"""
