package chaos

import (
	"database/sql"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// length is how long each server is to be tormented; 0 is the short form.
func length(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("CHAOS_TIME")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal("CHAOS_TIME:", err)
	}
	return d
}

// TestChaos torments each server. In the short form a server of each flavour is tormented: they
// share half of the faults, chosen at random, and their clients have more rest.
func TestChaos(t *testing.T) {
	t.Parallel()
	bins, pause := tempserver.RequireOwn(t), time.Duration(0)
	if length(t) == 0 {
		bins, pause = tempserver.EachFlavour(bins), 300*time.Millisecond
	}
	for i, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			a := newArena(t, bin)
			a.pause = pause
			a.torment(length(t), length(t) > 0, i, 2*len(bins))
		})
	}
}

// torment has rounds of faults for a length of time, at least one. In each round
// each fault comes once, or each that is the i-th's of n.
func (a *arena) torment(length time.Duration, all bool, i, n int) {
	a.t.Helper()
	c := a.column()
	start := time.Now()
	for c.rounds == 0 || time.Since(start) < length {
		a.begin(3, 2, a.possible(c)...)
		a.recover(0)
		for at, f := range a.shuffled() {
			if !all && at%n != i {
				continue
			}
			w := a.inflict(f)
			a.t.Logf("%s: %d in %v, and all was well %v later", f.name, w.times, time.Duration(w.to-w.from).Round(time.Millisecond), time.Duration(w.back-w.to).Round(time.Millisecond))
		}
		b := a.end()
		wrong, known := a.judge(b)
		a.tally(b)
		c.count(a, wrong, known)
		for _, v := range wrong {
			a.t.Error(v)
		}
		for _, v := range known {
			a.t.Log("not promised:", v)
		}
	}
	c.took = time.Since(start)
	page.add(c)
}

// possible returns the strategies that the driver does not refuse here, and notes
// the others.
func (a *arena) possible(c *column) (names []string) {
	a.t.Helper()
	if a.cluster == nil {
		return strategies
	}
	if c.refused == nil {
		c.refused = make(map[string]string)
		db, err := sql.Open("mysqllock", a.nodes[a.primary].DSN("mysql")+"?lockNamespace=trial&lockTable=trial.mysqllock")
		a.must(err)
		defer db.Close()
		a.must(a.exec("CREATE DATABASE trial"))
		for name, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lease, "advisory": advisory, "optimistic": optimistic} {
			hold, err := mysqllock.Acquire(a.t.Context(), db, "trial", option)
			switch {
			case errors.Is(err, mysqllock.ErrUnsafe):
				c.refused[name] = err.Error()
			default:
				a.must(err)
				a.must(hold.Release())
			}
		}
	}
	for _, name := range strategies {
		if _, is := c.refused[name]; !is && (c.refused["row"] == "" || name != "mixed" && name != "slots") {
			names = append(names, name)
		}
	}
	return names
}

// tally logs what became of the transfers, with an example of each kind.
func (a *arena) tally(b *books) {
	a.t.Helper()
	type kind struct {
		job    string
		result result
	}
	counts, examples := make(map[kind]int), make(map[kind]string)
	for _, e := range a.history.events {
		if e.Kind == kindEnd {
			k := kind{e.Job, e.Result}
			counts[k]++
			examples[k] = e.Error
		}
	}
	for _, job := range a.jobs {
		for _, r := range results {
			if k := (kind{job, r}); counts[k] > 0 {
				a.t.Logf("%s: %d %s %s", job, counts[k], r, examples[k])
			}
		}
	}
	a.t.Logf("%d events, %d lines in the ledger", len(a.history.events), len(b.entries))
}
