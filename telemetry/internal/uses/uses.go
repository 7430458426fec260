// Package uses names what connections are for, in metrics.
package uses

import (
	"github.com/mysqllock/mysqllock"
)

// Connections are those for one use.
type Connections struct {
	Use string
	mysqllock.ConnStats
}

// Of returns the connections of a handle by use. Those of the application are among them
// with maxConns only: without it the driver does not know them.
func Of(s mysqllock.PoolStats) []Connections {
	all := []Connections{{"sessions", s.ConnStats}, {"leases", s.Leases}, {"advisory", s.Advisory}, {"control", s.Control}}
	if s.MaxConns > 0 {
		all = append(all, Connections{"app", s.App})
	}
	return all
}
