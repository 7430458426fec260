// Package soak has no code of its own. Its test has very many clients, in several
// processes, take locks of all kinds for a long time on one server that has fewer
// connections than they want: nothing may hang, grow, or get lost. "make soak" is
// the long form.
package soak
