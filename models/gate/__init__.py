"""Gate: the decision whether a newly trained policy (challenger) replaces the policy in use (champion)."""
