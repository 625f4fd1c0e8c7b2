"""Policy soups: several policies are trained on different mixes of rewards and merged by weighted averages.

The modules compute the mixes of rewards, the weights of a merge, and the quality of a set of merges. Pure NumPy.
"""
