"""Weights from storage into host or device memory; serves any torch program and knows no model.

Importing it is cheap: public names resolve on first use, and none of them imports torch.
"""
