//go:build unix

package clusters

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// doctor says which strategies are safe here.
func doctor(t *testing.T, c *cluster, node int, safe string) {
	t.Run(fmt.Sprint("doctor on node ", node), func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		i, err := inspect.New(dbtest.Open(s, "mysql", s.DSN(node, s.database)), inspect.Options{})
		dbtest.OK(t, err)
		d, err := i.Doctor(t.Context())
		dbtest.OK(t, err)
		var got []string
		for _, v := range d.Verdicts {
			if v.Safe {
				got = append(got, v.Strategy)
			}
		}
		if strings.Join(got, " ") != safe {
			t.Errorf("it says that %v are safe, want %s: %+v", got, safe, d)
		}
	})
}
