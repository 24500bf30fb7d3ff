"""What proposes tokens: an EAGLE-3 head, another causal language model, or the row's own text."""
