//go:build unix

package clusters

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// holder is somebody in a transaction under a lock, who has written.
type holder struct {
	key      string
	id       int // of the product
	strategy lockctx.Option
	tx       *sql.Tx
	token    uint64 // of a lease
}

func (s *scratch) hold(node, id int, strategy lockctx.Option) *holder {
	s.Helper()
	h := &holder{key: fmt.Sprint("p", id), id: id, strategy: strategy}
	ctx := lockctx.With(dbtest.Within(s, dbtest.Patience), h.key, strategy)
	var err error
	h.tx, err = s.open(node, "readTimeout=30s").BeginTx(ctx, nil)
	dbtest.OK(s.T, err)
	h.token, _ = mysqllock.Token(ctx)
	_, err = h.tx.Exec("UPDATE p SET stock = 1000 WHERE id = ?", h.id)
	dbtest.OK(s.T, err)
	return h
}

// failovers: who holds a lock on a node that is killed, paused or cut off has
// nothing committed once somebody else has had the lock on another node. Who
// holds one on another node goes on. Where there is little time there is only one
// of the faults.
func failovers(t *testing.T, c *cluster, only string, strategies ...lockctx.Option) {
	faults := []struct {
		name       string
		do, repair func(ctx context.Context, node int) error
	}{
		{
			"pause",
			func(_ context.Context, node int) error { return c.Nodes[node].Pause() },
			func(_ context.Context, node int) error { return c.Nodes[node].Resume() },
		},
		{
			"kill",
			func(_ context.Context, node int) error { return c.Nodes[node].Kill() },
			func(context.Context, int) error { return nil },
		},
		{"isolate", c.Isolate, c.Heal},
	}
	for _, fault := range faults {
		t.Run(fault.name, func(t *testing.T) {
			if fault.name != only && !long() {
				t.Skip("only with CLUSTERS=long")
			}
			s := c.scratch(t)
			node := s.primary()
			var holders, others []*holder
			for i, strategy := range strategies {
				holders = append(holders, s.hold(node, 1+i, strategy))
				if c.topology != tempserver.GroupSinglePrimary {
					others = append(others, s.hold((node+1)%len(c.Nodes), 3+i, strategy))
				}
			}
			began := time.Now()
			dbtest.OK(t, fault.do(t.Context(), node))
			for _, h := range holders {
				s.succeed(h, node)
				t.Logf("%s: after %v somebody else has had it", h.key, time.Since(began).Round(time.Millisecond))
			}
			dbtest.OK(t, fault.repair(t.Context(), node))
			for _, h := range holders {
				err := h.tx.Commit()
				t.Logf("%s: the holder's commit: %v", h.key, err)
				if err == nil {
					t.Errorf("%s: a holder that had lost its lock has committed", h.key)
				}
			}
			for _, h := range others {
				dbtest.OK(t, h.tx.Commit())
			}
			dbtest.OK(t, c.Rejoin(t.Context(), node))
			for i := range c.Nodes {
				for _, h := range holders {
					s.wantStock(i, h.id, 1)
				}
				for _, h := range others {
					s.wantStock(i, h.id, 1000)
				}
			}
			t.Logf("all is well after %v", time.Since(began).Round(time.Millisecond))
		})
	}
}

// succeed has another node lock the key and raise the stock, as soon as it can.
func (s *scratch) succeed(h *holder, down int) {
	s.Helper()
	dbtest.Eventually(s, "another node goes on", func() (err error) {
		for node := range s.Nodes {
			if node == down {
				continue
			}
			if err = s.tryRaise(h, node); err == nil {
				return nil
			}
		}
		return err
	})
}

func (s *scratch) tryRaise(h *holder, node int) error {
	ctx, cancel := context.WithTimeout(s.Context(), 5*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, h.key, h.strategy)
	db, err := sql.Open("mysqllock", s.DSN(node, s.database)+"?timeout=5s&readTimeout=10s&lockWait=5s")
	if err != nil {
		return err
	}
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if token, leased := mysqllock.Token(ctx); leased && token <= h.token {
		s.Errorf("%s: token %d was granted after %d", h.key, token, h.token)
	}
	var stock int
	if err := tx.QueryRow("SELECT stock FROM p WHERE id = ?", h.id).Scan(&stock); err != nil {
		return err
	}
	if stock > 1 {
		s.Errorf("%s: stock %d can be read, which nobody has committed", h.key, stock)
	}
	if stock == 1 {
		return nil // an earlier try, whose answer was lost
	}
	if _, err := tx.Exec("UPDATE p SET stock = 1 WHERE id = ?", h.id); err != nil {
		return err
	}
	return tx.Commit()
}

// primary is a node that takes writes.
func (s *scratch) primary() (primary int) {
	s.Helper()
	if s.topology != tempserver.GroupSinglePrimary {
		return 0
	}
	dbtest.Eventually(s, "there is a primary", func() error {
		for i := range s.Nodes {
			var role string
			err := s.plain[i].QueryRow("SELECT MEMBER_ROLE FROM performance_schema.replication_group_members WHERE MEMBER_ID = @@server_uuid").Scan(&role)
			if err == nil && role == "PRIMARY" {
				primary = i
				return nil
			}
		}
		return errors.New("there is none")
	})
	return primary
}
