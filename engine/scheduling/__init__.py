"""Queues, fairness, slots and pages: who goes next.

Why lookahead is safe
---------------------
`plan` may be called again before earlier plans are committed, any number of times. The executor runs plans
strictly in order; at the start of a plan it applies the releases, then admissions, then copies; then come
the rows. So "earlier" and "later" below mean the order of plans, whenever their results are read.

*A row whose input is not known yet.* A decode row says "position p", and the token there is what this slot
sampled in the plan before. Whether that token ends the sequence by its place is known without seeing it: no
row is planned whose token would lie beyond `max_tokens` or `max_model_len`. What only the token itself can
tell is a stop.

*A sequence that ends while it has rows in flight* (a stop token, a failure, a cancel). It is ENDED at once
and its pages and slot are free at once, although plans F1..Fk in flight still write to them. Whoever gets
such a page gets it in a plan G made now, after all F. Each F has run before G starts. So the late writes
land before anything of G: before G's copies, and before its rows, and a row reads no position that its own
sequence, or the prefix it shares, has not written since. The slot is the same story: G carries the release,
in front of any admission to that slot, and every row of the old sequence lies in some F. Results of F for
an ENDED sequence are discarded.

*Pages in the prefix cache are never written.* A page is published by the commit of the step that filled it,
with tokens that are all committed. A running sequence writes at `planned` or above, and published pages lie
below `computed`, at or below `planned`. Rows that are discarded are no exception: they lie at or above
`computed`, hence in pages that were not published. So what a later plan shares or copies is what it looked
like at publication, unless it was evicted; and evicted pages are out of the trie before they are given
away.

*Copies of one plan do not depend on each other.* A source stays pinned until the plan is made, so it is not
among the pages that the same plan gives out; and destinations are private pages, never sources. Any order
will do.

*Preemption keeps what is in flight.* The tokens of rows in flight are right, although the pages are gone:
they are committed as usual and join the log. Only then (RETURNING becomes WAITING) may the sequence be
admitted again, so that the admission's log is complete and no row of an old admission is ever taken for one
of the new. Victims have no row in the plan at hand: decode rows are planned in order of rank and the last
by rank goes first; those that give way to others who wait go before any row is planned.

*A row that sits out* (its grammar's mask is not made yet) brings no token, and its sequence no further row
until `resume`: it keeps its slot and pages, and the position is computed again. Rows of it that were planned
by then have no input; they sit out too, and what they wrote lies at or above `computed`, as above.

*It always goes on.* A tenant that gives seats keeps its share of them, and the oldest of its sequences. The
sequence first by rank is never a victim of another that runs. It fails only when it is alone, needs a page,
nothing can be evicted and its last token is known, so the outcome does not depend on the depth of lookahead.
If it holds pages twice by then, its own and those of who computed the same first, it comes back for these.
With `max_batch_tokens` at least `max_seqs`, decode rows leave a token for every prompt that has begun.
"""
