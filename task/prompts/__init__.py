"""Prompts of a frozen Vision Transformer, one kind a file.

Shapes: B images, D numbers of a token, L_p vectors of a prompt, J prompted blocks, N or M prompts of a pool. A prompt
gives each prompted block either prefixes [B, 2, L_p, D] (keys, then values; prefix tuning, HGP section 3.2, PIP eq. 3)
or tokens [B, L_p, D] (prompt tuning, PIP eq. 2), or with LoRA a change [3 D, D] of the weights that make queries, keys
and values. B is 1 where all images have the same.
"""
