"""The sampling laws: pure functions on tensors, batched over rows. Imports torch and nothing else.

    keys, draws        randomness: counter-based keys, and the one door through which every draw goes
    probabilities      logits and sampling parameters to the target's law p
    candidates         the candidate slots of a node, one policy per method
    growth, tree       candidates level by level with a beam; pruning by the total order; masks, depths, parents
    static             trees of a shape that is fixed in advance
    verification       which drafted nodes become text, and the token after them
    theory             closed forms to hold the code against

Shape suffixes, here and in the whole engine: B rows, F frontier nodes of a level, K candidate slots (and the beam's width), C candidates of
a level, M tokens of the draft's law, P pool entries, E expanded nodes, R tree nodes (root included), L levels, V vocabulary; N packed
tokens, Q padded ones, W those of a masked region, T all keys; H hidden, D head. In attention K is key heads; the F of a packed tensor is
the width of the target's features.
"""
