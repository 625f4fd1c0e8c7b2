"""Comparison of a challenger with the champion, verdict of the gate, and the number of problems that it needs."""
