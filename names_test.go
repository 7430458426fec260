package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/lockctx"
)

// soonFree waits until a key is: where the server was slow to answer, what was asked
// of it is taken back in the background.
func (s *scratch) soonFree(key string) {
	s.T.Helper()
	dbtest.Soon(s.T, key+" is free", func() bool { return !s.locked(key) })
}

// TestANameThatLooksLikeSQLIsAName on real servers, in their strictest and their laxest reading
// of SQL: its row is made, no two are the same lock, and nothing else is touched.
func TestANameThatLooksLikeSQLIsAName(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE canary (name VARCHAR(20) PRIMARY KEY) ENGINE=InnoDB")
		dbtest.Exec(t, s.plain, "INSERT INTO canary VALUES ('sings')")
		modes := []string{"", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"}
		if s.MariaDB() {
			modes = append(modes, "ORACLE")
		}
		for _, mode := range modes {
			params := "sql_mode=" + url.QueryEscape("'"+mode+"'")
			for _, how := range rightsOf {
				holder, other := s.open(params), s.open(params)
				holds := make([]*mysqllock.Hold, len(hostileNames))
				for i, key := range hostileNames {
					if how.name != "row" && how.name != "lease" && how.name != "advisory" && i%3 > 0 && !dbtest.Long(false, true) {
						continue // they name rows as row locks do
					}
					ctx := lockctx.With(dbtest.Limited(t), key, how.holds)
					if _, err := holder.ExecContext(ctx, "UPDATE p SET stock = 10"); err != nil {
						t.Fatalf("%s, %q: %v", how.name, key, err)
					}
					if !how.waitsForOther || how.name != "lease" && how.name != "advisory" { // which need no connection each
						continue
					}
					var err error
					if holds[i], err = mysqllock.Acquire(dbtest.Limited(t), holder, key, how.holds, lockctx.Wait(ttl)); err != nil {
						t.Fatalf("%s, %q, with the names before it held: %v", how.name, key, err)
					}
				}
				for i, hold := range holds {
					if hold == nil {
						continue
					}
					if _, err := mysqllock.Acquire(dbtest.Limited(t), other, hostileNames[i], how.wants, lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s, %q: somebody else gets %v", how.name, hostileNames[i], err)
					}
					dbtest.OK(t, hold.Release())
				}
				dbtest.OK(t, holder.Close())
				dbtest.OK(t, other.Close())
			}
		}
		want := []string{}
		for _, key := range hostileNames {
			want = append(want, keyrow.Name(key))
		}
		slices.Sort(want)
		if got := s.names("SELECT name FROM mysqllock WHERE namespace = DATABASE() ORDER BY name"); !slices.Equal(got, want) {
			t.Errorf("the rows are %q, want %q", got, want)
		}
		if got := s.names("SELECT name FROM canary"); !slices.Equal(got, []string{"sings"}) {
			t.Errorf("the canary is %q", got)
		}
		if got := s.names("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() ORDER BY 1"); !slices.Equal(got, []string{"canary", "mysqllock", "p"}) {
			t.Errorf("the tables are %q", got)
		}
	})
}

func (s *scratch) names(query string) []string {
	s.T.Helper()
	return dbtest.Column[string](s.T, s.plain, query)
}

// TestASettingThatLooksLikeSQLIsAName: what a handle calls its namespace and itself, and the
// database that it is in.
func TestASettingThatLooksLikeSQLIsAName(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		before := s.names("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
		for n, database := range []string{"t_`; DROP TABLE p; -- " + dbtest.Random()[:6], "t_' \" \\ " + dbtest.Random()[:6]} {
			quoted := "`" + strings.ReplaceAll(database, "`", "``") + "`"
			dbtest.Exec(t, s.plain, "CREATE DATABASE "+quoted)
			defer dbtest.Exec(t, s.plain, "DROP DATABASE "+quoted)
			dbtest.Exec(t, s.plain, "CREATE TABLE "+quoted+".p SELECT * FROM p")
			in := s.Changed(func(cfg *mysql.Config) { cfg.DBName = database })
			dbtest.Exec(t, in.Open("mysql"), "DELETE FROM p WHERE id = 4") // it is that one
			for i, name := range hostileNames {
				if i%3 > 0 && !strings.ContainsAny(name, "'`\";") || i%2 != n && !dbtest.Long(false, true) {
					continue
				}
				connector, err := mysqllock.NewConnector(in.Config(), mysqllock.Config{Namespace: name, Owner: name})
				dbtest.OK(t, err)
				db := sql.OpenDB(connector)
				for _, how := range rightsOf {
					_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k", how.holds), "UPDATE p SET stock = 10")
					if err != nil {
						t.Fatalf("database %q, namespace and owner %q, %s: %v", database, name, how.name, err)
					}
				}
				h := stock.Acquire(t, db, "k", lockctx.Lease(ttl))
				err = naming(func() error {
					other, err := mysqllock.NewConnector(in.Config(), mysqllock.Config{Namespace: name})
					dbtest.OK(t, err)
					db := sql.OpenDB(other)
					defer db.Close()
					_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl), lockctx.NoWait())
					return err
				})
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil || !strings.HasPrefix(name, e.Holder.Program) || strings.ContainsAny(err.Error(), "\n\r\x00") {
					t.Errorf("the lease of owner %q: %q", name, err)
				}
				dbtest.OK(t, h.Release())
				dbtest.OK(t, db.Close())
			}
		}
		after := s.names("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
		if len(after) < len(before) { // other tests make and drop theirs
			t.Logf("the databases were %q and are %q", before, after)
		}
		s.wantStock(1, 10)
		s.wantStock(4, 10)
	})
}

// hostileNames are names that would do something else than name a key if any
// statement took them for text.
var hostileNames = []string{
	`'`, `"`, "`", `\`, `\'`, `''`, `' OR '1'='1`, `k'; DROP TABLE canary; -- `, `k'); DROP TABLE canary; -- `, "k`; DROP TABLE canary; -- ",
	`k" OR 1=1 #`, `/* k`, `*/ k`, `/*!50000 k */`, `/*M! k */`, `-- k`, `#k`, `?`, `%s%d%n`, `%`, `_`, `@@version`, `x'6b'`, `0x6b`, `NULL`, `:name`,
	"k\x00", "\x00k", "\x00", "\x00\x00k", "\x00slot 1:k", "\x00stripes", "\x00stripe 1", "\x00zero", "k\nk", "k\r\n", "k\tk", "k ", " k", "K", "k",
	"\x1a", "\xff\xfe", "\xbf\x27", "\xc0\xa7", "ключ", "鍵", "é", "e\u0301", "👍", "\u202ek", strings.Repeat("k", 255), strings.Repeat("'", 255), strings.Repeat("\x00", 255),
}

var (
	versionOf = regexp.MustCompile(`^SELECT .*@@transaction_isolation, name, token, .* name IN \(x'([0-9a-f]*)'\)`)

	literal = regexp.MustCompile(`x'[0-9a-f]*'|CONVERT\('[0-9a-f]*' USING ascii\)`)
	quoted  = regexp.MustCompile(`'[A-Za-z0-9_.:%/#\-]{0,64}'`) // of named locks, marks, and the driver's own words
	marks   = regexp.MustCompile(`[0-9a-f]{24,64}|\b[0-9]+\b`)  // and times
)

// FuzzNames: whatever keys, namespaces and owners are called, the statements
// differ in nothing but their hexadecimal literals and the safe names of named
// locks.
func FuzzNames(f *testing.F) {
	for i := 0; i < len(hostileNames); i += dbtest.Long(3, 1) {
		f.Add(hostileNames[(i+1)%len(hostileNames)], hostileNames[(i+2)%len(hostileNames)], hostileNames[i])
	}
	usual := make(map[string]bool)
	for range 10 { // what is done in the background is not always the same
		for _, key := range []string{"k", "1"} { // which the fake server answers
			sent, err := sentFor("shop", "me", key)
			dbtest.OK(f, err)
			for _, statement := range sent {
				usual[statement] = true
			}
		}
	}
	f.Fuzz(func(t *testing.T, namespace, owner, key string) {
		if namespace == "" || len(namespace) > 255 || owner == "" || key == "" || len(key) > 255 {
			return
		}
		sent, err := sentFor(namespace, owner, key)
		dbtest.OK(t, err)
		if len(sent) < len(usual)/2 {
			t.Errorf("namespace %q, owner %q, key %q: no more is sent than %q", namespace, owner, key, sent)
		}
		for _, statement := range sent {
			if !usual[statement] {
				t.Errorf("namespace %q, owner %q, key %q: %q", namespace, owner, key, statement)
			}
		}
	})
}

// sentFor returns what is sent for locks of each strategy on key, without what may
// differ.
func sentFor(namespace, owner, key string) (sent []string, err error) {
	for _, how := range rightsOf {
		fake := newFake().mysqlAnswers()
		answer := fake.answer
		fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if literal.ReplaceAllString(text, "") == literal.ReplaceAllString(sqlStripes, "") {
				text = sqlStripes // of any namespace
			}
			reply, err := answer(c, text)
			if len(reply.rows) == 3 && !strings.HasPrefix(text, "UPDATE p") { // it is none that the fake knows
				row := slices.Repeat([]driver.Value{int64(1)}, 8)
				if m := versionOf.FindStringSubmatch(text); m != nil { // of a key that nobody has leased
					name, _ := hex.DecodeString(m[1])
					row = []driver.Value{"REPEATABLE-READ", string(name), int64(1), int64(1), int64(0), nil}
				}
				reply = fakeReply{columns: make([]string, len(row)), rows: [][]driver.Value{row}}
			}
			return reply, err
		}
		connector, wrapErr := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{Namespace: namespace, Owner: owner, NoWait: true})
		if wrapErr != nil {
			return nil, wrapErr
		}
		db := sql.OpenDB(connector)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		for range 2 { // the second time the row is known
			_, execErr := db.ExecContext(lockctx.With(ctx, key, how.holds), "UPDATE p SET stock = 1")
			err = errors.Join(err, execErr)
		}
		cancel()
		_ = db.Close()
		for _, line := range fake.sent() {
			if strings.Contains(line, " connector ") || strings.Contains(line, "Ping") {
				continue
			}
			line = literal.ReplaceAllString(strings.TrimSuffix(line, " (context canceled)"), "x''")
			line = quoted.ReplaceAllString(line, "''")
			sent = append(sent, how.name+": "+marks.ReplaceAllString(line, "…"))
		}
	}
	return sent, err
}
