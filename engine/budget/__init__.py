"""The budget: how large a tree each cycle drafts (DESIGN.md section 7).

    plan          the trees of one cycle, and the grid that `auto` chooses from
    costs         seconds of a cycle, learned from past ones
    acceptance    tokens that a tree of each setting would have had accepted, learned from past cycles
    auto          the controller: the setting with the most expected tokens per second, for each size of batch

Whatever is read here was fixed before the present cycle's draws (LAW.md section 6): past cycles, the clock, and the number of rows.
"""
