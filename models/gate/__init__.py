"""Decision whether a challenger replaces the champion: paired comparison, verdict, and the number of problems needed."""
