// Package parity runs random programs twice: on a handle of this driver, and on one of the plain MySQL
// driver. Both must see the same: each value, with its type, each count, each error, and what is in the
// tables in the end.
//
// A program is a list of steps of a few actors, each with a table of its own: a step is a statement, on
// the handle, a sql.Conn, a sql.Tx or a prepared statement, or opens or ends one of these. Programs use what
// belongs to a connection (variables, temporary tables, LAST_INSERT_ID, warnings, transactions in SQL
// text, the default database), cancel statements, and kill connections. Some actors run under a lock,
// which the plain handle knows nothing of. There a typed error may come in place of an answer, which
// ends the program; another answer may not.
//
// A program that is not the same is run again with steps left out, until no other can go, and printed.
package parity
