package unit

import (
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// route is the way that a statement under a lock goes.
type route int

const (
	routeNone        route = iota // the statement is refused
	routeTransaction              // in the unit of work of the connection's transaction
	routeJoin                     // in the unit of work that its lock context has open
	routeDefinition               // DDL in holds: on the application's connection, once the holds are checked
	routeRead                     // a query that only reads: its locks are kept when it is over
	routeAlone                    // in a unit of work of its own, which ends with the statement
)

// routeOf returns the route of a statement, by the transaction tx of its connection, the hint h of its context, the
// open unit u of its lock context, and the statement's kind. What users need of the table is in
// docs/lock-contexts.md, "What each statement does":
//
//	tx             u      the statement                              route
//	under a lock   –      any                                        routeTransaction
//	without one    –      any                                        refused: errBeganWithout
//	none           any    ends a transaction; asks for a lock        refused: errCommits
//	none           any    ends a transaction; in holds alone         refused: errUnchecked
//	none           any    DDL; in holds alone                        routeDefinition
//	none           open   any other                                  routeJoin
//	none           none   a query that only reads                    routeRead
//	none           none   any other                                  routeAlone
//
// DDL ends a transaction, too. "In holds alone" means that the context asks for no lock beside those of the Do or
// Acquire around it. h is nil only in a transaction.
func routeOf(tx *Tx, h *hint.Hint, u *unit, st *statement.Statement) (route, error) {
	switch asks := h != nil && h.LockContext != nil; {
	case tx != nil && tx.locked():
		return routeTransaction, nil
	case tx != nil:
		return routeNone, errBeganWithout
	case st.Info.Kind == sqltext.Commits && asks:
		return routeNone, errCommits
	case st.Info.Kind == sqltext.Commits && !st.Info.Defines:
		return routeNone, errUnchecked
	case st.Info.Kind == sqltext.Commits:
		return routeDefinition, nil
	case u != nil:
		return routeJoin, nil
	case st.Query && st.Info.Kind == sqltext.Read:
		return routeRead, nil
	default:
		return routeAlone, nil
	}
}
