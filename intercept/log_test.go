package intercept_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// lines is where a test logs to.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// with returns the lines that have all of these in them.
func (l *lines) with(words ...string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
next:
	for line := range strings.Lines(l.text.String()) {
		for _, word := range words {
			if !strings.Contains(line, word) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// TestEachStatementIsLoggedOnALine: with its time; a lock statement says for which lock it is.
// Arguments are in it on request, and secrets never.
func TestEachStatementIsLoggedOnALine(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		plain, full := new(lines), new(lines)
		db := s.open(mysqllock.Config{},
			intercept.Log(slog.New(slog.NewTextHandler(plain, nil))), intercept.LogArguments(slog.New(slog.NewTextHandler(full, nil))))
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		dbtest.OK(t, sell(lockctx.With(ctx, "a key"), db))
		dbtest.OK(t, buy(lockctx.With(ctx, "another", lockctx.Lease(20*time.Second)), db))
		dbtest.ExecIn(t, ctx, db, "UPDATE shop SET stock = ? WHERE id = ? AND 'password' <> ?", 3, 1, "hunter2")
		for _, text := range []string{"SELECT nothing FROM nowhere", "ALTER USER nobody_at_all IDENTIFIED BY 'hunter2'"} {
			if _, err := db.ExecContext(ctx, text); err == nil {
				t.Errorf("%s has not failed", text)
			}
		}
		for _, l := range []*lines{plain, full} {
			for _, want := range [][]string{
				{"msg=exec", "took_ms=", "UPDATE shop SET stock"},
				{"msg=query", "took_ms=", "SELECT stock FROM shop"},
				{"msg=connect", "took_ms="},
				{"step=take", "strategy=row", `keys="[a key]"`},
				{"step=end"},
				{"step=fence", "strategy=lease", "keys=[another]"},
				{"SELECT nothing", "error=", "nowhere"},
				{"ALTER (not shown", "error=\"not shown\""},
			} {
				if len(l.with(want...)) == 0 {
					t.Errorf("no line has %q in:\n%s", want, l.with())
				}
			}
			for _, line := range l.with("/* app */") {
				if strings.Contains(line, "step=") {
					t.Errorf("a statement of the application's is a lock statement: %s", line)
				}
			}
			if said := l.with("hunter2"); len(said) > 0 {
				t.Errorf("a secret is in %s", said)
			}
		}
		if said := plain.with("args="); len(said) > 0 {
			t.Errorf("arguments are in %s", said)
		}
		if len(full.with("UPDATE shop SET stock = ? WHERE id = 1 /* app */", "args=[9]")) == 0 {
			t.Errorf("the arguments are missing in %s", full.with("UPDATE shop"))
		}
	})
}
