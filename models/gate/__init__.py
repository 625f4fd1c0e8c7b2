"""Whether a challenger takes the champion's place: paired comparison, verdict, how many problems it takes."""
