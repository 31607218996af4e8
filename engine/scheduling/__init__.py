"""Queues, fairness, slots and pages: which sequences run next.

Why lookahead is safe
---------------------
`plan` may be called again, any number of times, before earlier plans are committed. The executor runs plans
strictly in order. A plan begins with its releases, then admissions, then copies, then the rows. So "earlier"
and "later" below mean the order of plans, whenever their results are read.

*A row whose input is not known yet.* A decode row says "position p", and its token is the one that this slot
sampled in the plan before. Whether that token ends the sequence by its position is known without the token:
no row is planned whose token would lie beyond `max_tokens` or `max_model_len`. Only a stop depends on the
token itself.

*A sequence that ends while it has rows in flight* (a stop token, a failure, a cancellation). It is ENDED at
once, and its pages and slot are free at once, although plans F1..Fk in flight still write to the pages. A
sequence that gets such a page gets it in a plan G that is made now, after all F. Each F runs before G starts.
So the late writes happen before G's copies and before its rows; and a row reads no position that its own
sequence, or the prefix it shares, has not written since. The same holds for the slot: G has the release
before any admission to that slot, and every row of the old sequence is in some F. Results of F for an ENDED
sequence are discarded.

*Pages in the prefix cache are never written.* The commit of the step that filled a page publishes it, with
tokens that are all committed. A running sequence writes at `planned` or above, and published pages lie below
`computed`, which is at most `planned`. This includes discarded rows: they lie at or above `computed`, hence
in unpublished pages. So a page that a later plan shares or copies still has its published content, unless it
was evicted; and an evicted page leaves the trie before it is allocated again.

*Copies of one plan do not depend on each other.* A source stays pinned until the plan is made, so the same
plan does not allocate it. Destinations are private pages, never sources. So any order is correct.

*Preemption keeps what is in flight.* The tokens of rows in flight are right, although the pages are gone.
They are committed as usual and join the log. Only then (RETURNING becomes WAITING) may the sequence be
admitted again. So the admission's log is complete, and no row of an old admission is taken for one of the
new. A preempted sequence has no row in the current plan: decode rows are planned in order of rank and the
last by rank is preempted first; sequences that are preempted for others that wait lose their slot before any
row is planned.

*A plan that is made again* (`replan`) has not begun, so its rows have written nothing, and those that are
taken back never will. What it took (slots, pages, pins of what it copies) stays taken, and its releases and
copies stay in front. A sequence that it preempts has no row in it. So it is as if it were made only now,
with more in it. If one of its sequences has ended meanwhile, it stays as it is: the row of that sequence is
still in it, and the pages of that sequence are free.

*A deferred row* (its grammar's mask is not ready) has no token, and its sequence no further row until
`resume`. It keeps its slot and pages, and the position is computed again. Rows of it that are already planned
have no input; they are deferred too, and they wrote at or above `computed`, as above.

*Progress is guaranteed.* A tenant that gives up slots keeps its share of them, and its oldest sequence. The
sequence first by rank is never preempted for another running one. It fails only if it is alone, needs a page,
nothing can be evicted and its last token is known. So the outcome does not depend on the depth of lookahead.
If it then holds pages twice (its own, and those of a sequence that published the same tokens first), it is
preempted and comes back with the latter. With `max_batch_tokens` at least `max_seqs`, decode rows leave a
token for every prompt that has begun.
"""
