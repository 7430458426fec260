package keyrow

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// row is "token age", the age in whole seconds, "" where there is no such row.
func (s *scratch) row(key string) string {
	s.T.Helper()
	return s.One(s.open(), "SELECT COALESCE(MAX(CONCAT(token, ' ', TIMESTAMPDIFF(SECOND, expires, UTC_TIMESTAMP(6)), ' ', COALESCE(owner, 'nobody'))), '') FROM "+
		s.table.String()+" WHERE namespace = 'app' AND name = '"+key+"'")
}

func TestExistLeavesRowsThatAreThereAsTheyAre(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		r := s.rows()
		c := s.open()
		s.Exec(c, "UPDATE "+s.table.String()+" SET token = 41")
		s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name, token) VALUES ('app', 'there', 3), ('app', 'plain', 0)")
		dbtest.OK(t, r.Exist(dbtest.Limited(t), []string{"one"}))
		dbtest.OK(t, r.Exist(dbtest.Limited(t), []string{"a", "b", "one", "plain", "there"}))
		for key, want := range map[string]string{"a": "41 0 nobody", "b": "41 0 nobody", "one": "41 0 nobody"} {
			if got := s.row(key); got != want {
				t.Errorf("%s is %q, want %q", key, got, want)
			}
		}
		if !strings.HasPrefix(s.row("there"), "3 ") || !strings.HasPrefix(s.row("plain"), "0 ") {
			t.Errorf("a row that was there is changed: %q, %q", s.row("there"), s.row("plain"))
		}
		for key, want := range map[string]bool{"there": true, "plain": false, "unheard of": false} {
			if r.Leased(key) != want {
				t.Errorf("Leased(%s) is %v", key, !want)
			}
		}
		r.NoteLeased("plain")
		if !r.Leased("plain") {
			t.Error("what was noted is forgotten")
		}

		// A known key costs nothing, a forgotten one is made again.
		s.Exec(c, "DELETE FROM "+s.table.String()+" WHERE name = 'a'")
		dbtest.OK(t, r.Exist(dbtest.Limited(t), []string{"a"}))
		dbtest.Equal(t, "a known key was looked at: %q", s.row("a"), "")
		r.Forget([]string{"a"})
		dbtest.OK(t, r.Exist(dbtest.Limited(t), []string{"a"}))
		dbtest.Equal(t, "a forgotten key is %q", s.row("a"), "41 0 nobody")
	})
}

// TestExistDoesNotWaitForLockedRows of keys, nor for a missing row beside them.
func TestExistDoesNotWaitForLockedRows(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.OK(t, s.rows().Exist(dbtest.Limited(t), []string{"b"}))
		holder := s.open()
		s.Exec(holder, "BEGIN")
		s.Exec(holder, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = 'b' FOR UPDATE")
		began := time.Now()
		dbtest.OK(t, s.rows().Exist(dbtest.Limited(t), []string{"a", "b", "c"}))
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("it waited for the holder, %v", d)
		}
	})
}

// TestExistWaitsForCleanUp: a new row begins with the high-water mark that a clean-up in
// progress leaves, at any isolation.
func TestExistWaitsForCleanUp(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, isolation := range []string{"READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"} {
			c, key := s.open(), strings.ToLower(isolation)
			s.Exec(c, "BEGIN")
			s.Exec(c, "UPDATE "+s.table.String()+" SET token = token + 50 WHERE namespace = ''")
			made := make(chan error, 1)
			go func() { made <- s.rowsAt(isolation).Exist(dbtest.Limited(t), []string{key}) }()
			select {
			case err := <-made:
				t.Errorf("%s: it did not wait; %v", isolation, err)
				made <- err
			case <-time.After(100 * time.Millisecond):
			}
			s.Exec(c, "UPDATE "+s.table.String()+" SET token = token + 50 WHERE namespace = ''")
			s.Exec(c, "COMMIT")
			dbtest.OK(t, <-made)
			highWater := s.One(c, "SELECT token FROM "+s.table.String()+" WHERE namespace = ''")
			if got := s.row(key); got != highWater+" 0 nobody" {
				t.Errorf("%s: the row is %q over the high-water mark %s", isolation, got, highWater)
			}
		}
	})
}

func TestExistMakesWhatIsMissing(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		for i, gone := range []string{"DELETE FROM " + s.table.String() + " WHERE namespace = ''", "DROP TABLE " + s.table.String()} {
			s.Exec(c, gone)
			r, key := s.rows(), fmt.Sprint("k", i)
			dbtest.OK(t, r.Exist(dbtest.Limited(t), []string{key}))
			// Its token is above all that there were.
			if token, rest, _ := strings.Cut(s.row(key), " "); len(token) != 16 || rest != "0 nobody" {
				t.Errorf("after %s: %s %s", gone, token, rest)
			}
		}
		r := s.rows()
		r.cfg.Auto = false
		s.Exec(c, "DROP TABLE "+s.table.String())
		if err := r.Exist(dbtest.Limited(t), []string{"k"}); err == nil || !strings.Contains(err.Error(), "CREATE TABLE") {
			t.Errorf("manual: %v", err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Exist(ended, []string{"k"}); err == nil {
			t.Error("no error with an ended context")
		}
	})
}

// TestTokenNeverGoesBack makes rows, takes leases and cleans up all at once.
func TestTokenNeverGoesBack(t *testing.T) {
	for _, isolation := range []string{"REPEATABLE READ", "READ COMMITTED"} {
		t.Run(isolation, func(t *testing.T) {
			dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
				const keys = 3
				var all, cleaners sync.WaitGroup
				var made, removed atomic.Int64
				stop := make(chan struct{})
				for range 2 {
					c := s.open()
					cleaners.Go(func() {
						for {
							select {
							case <-stop:
								return
							default:
							}
							n, err := s.table.Clean(dbtest.Limited(t), c, 0, 10)
							if err != nil {
								t.Error(err)
								return
							}
							removed.Add(int64(n))
						}
					})
				}
				last := make([]uint64, keys) // guarded by the key's lease
				var leases [keys]sync.Mutex
				began := time.Now()
				goOn := func() bool {
					d := time.Since(began)
					return d < time.Second || d < time.Minute && (made.Load() < 20 || removed.Load() < 10)
				}
				for range 3 {
					r, c := s.rowsAt(isolation), s.open()
					all.Go(func() {
						for i := 0; goOn(); i++ {
							k := i % keys
							key := strconv.Itoa(k)
							r.Forget([]string{key})
							if err := r.Exist(dbtest.Limited(t), []string{key}); err != nil {
								t.Error(err)
								return
							}
							where := " WHERE namespace = 'app' AND name = '" + key + "'"
							leases[k].Lock()
							s.Exec(c, "BEGIN")
							rows, err := server.Query(dbtest.Limited(t), c, "SELECT token FROM "+s.table.String()+where+" FOR UPDATE")
							if err != nil && !server.Deadlock(err) { // who waits for a row while it is removed and made again may be chosen
								t.Error(err)
							}
							if len(rows) == 1 {
								token, _ := strconv.ParseUint(rows[0][0], 10, 64)
								s.Exec(c, "UPDATE "+s.table.String()+" SET token = token + 1, owner = NULL, expires = UTC_TIMESTAMP(6)"+where)
								if token < last[k] {
									t.Errorf("the token of %s was %d and is %d", key, last[k], token)
								}
								last[k] = token + 1
								made.Add(1)
							}
							s.Exec(c, "COMMIT")
							leases[k].Unlock()
						}
					})
				}
				all.Wait()
				close(stop)
				cleaners.Wait()
				t.Logf("%d leases, %d rows removed", made.Load(), removed.Load())
				if made.Load() < 20 || removed.Load() < 10 {
					t.Error("that proves nothing")
				}
			})
		})
	}
}

func TestAHolderIsItsOwnerWithoutTheDigits(t *testing.T) {
	if h := HolderOf(""); h != nil {
		t.Errorf("nobody is %v", h)
	}
	for owner, want := range map[string]string{
		"host:1:app#0123abcd":  "host:1:app",
		"a#b#00000000":         "a#b",
		"host:1:app":           "host:1:app",
		"host:1:app#0123abcg":  "host:1:app#0123abcg",
		"host:1:app#123":       "host:1:app#123",
		"host:1:app#0123abcd0": "host:1:app#0123abcd0",
		"#00000000":            "",
	} {
		if h := HolderOf(owner); h == nil || h.Program != want {
			t.Errorf("HolderOf(%q) is %v, want %q", owner, h, want)
		}
	}
}

func TestKnownIsBounded(t *testing.T) {
	var k known
	k.add("leased", past{lease: true})
	k.add("plain", past{})
	for i := range knownHalf + 10 {
		k.add(strconv.Itoa(i), past{})
		if i%1000 == 0 && len(k.missing([]string{"leased"})) > 0 {
			t.Fatal("what is used is forgotten")
		}
	}
	if !k.Leased("leased") {
		t.Error("that it had a lease is forgotten")
	}
	k.add("leased", past{})
	if !k.Leased("leased") {
		t.Error("that it had a lease is forgotten when it is seen again")
	}
	for i := range 2 * knownHalf {
		k.add(strconv.Itoa(-i), past{})
	}
	if len(k.missing([]string{"plain"})) == 0 || len(k.newer)+len(k.older) > 2*knownHalf {
		t.Errorf("%d and %d are remembered", len(k.newer), len(k.older))
	}
}
