package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// hostileNames are names that would do something else than name a key if any
// statement took them for text.
var hostileNames = []string{
	`'`, `"`, "`", `\`, `\'`, `''`, `' OR '1'='1`, `k'; DROP TABLE canary; -- `, `k'); DROP TABLE canary; -- `, "k`; DROP TABLE canary; -- ",
	`k" OR 1=1 #`, `/* k`, `*/ k`, `/*!50000 k */`, `/*M! k */`, `-- k`, `#k`, `?`, `%s%d%n`, `%`, `_`, `@@version`, `x'6b'`, `0x6b`, `NULL`, `:name`,
	"k\x00", "\x00k", "\x00", "\x00\x00k", "\x00slot 1:k", "\x00stripes", "\x00stripe 1", "\x00floor", "k\nk", "k\r\n", "k\tk", "k ", " k", "K", "k",
	"\x1a", "\xff\xfe", "\xbf\x27", "\xc0\xa7", "ключ", "鍵", "é", "e\u0301", "👍", "\u202ek", strings.Repeat("k", 255), strings.Repeat("'", 255), strings.Repeat("\x00", 255),
}

var (
	literal = regexp.MustCompile(`x'[0-9a-f]*'|"[0-9a-f]*"|CONVERT\('[0-9a-f]*' USING ascii\)`) // the second in the JSON that a procedure is given
	quoted  = regexp.MustCompile(`'[A-Za-z0-9_.:%/#\-]{0,64}'`)                                 // of named locks, marks, and the driver's own words
	marks   = regexp.MustCompile(`[0-9a-f]{24,64}|\b[0-9]+\b`)                                  // and times
)

// FuzzNames: whatever keys, namespaces and owners are called, the statements
// differ in nothing but their hexadecimal literals and the safe names of named
// locks.
func FuzzNames(f *testing.F) {
	for i, name := range hostileNames {
		f.Add(hostileNames[(i+1)%len(hostileNames)], hostileNames[(i+2)%len(hostileNames)], name)
	}
	usual := make(map[string]bool)
	home := false                                                  // a transaction has begun with its advisory lock, which it may as soon as it is known how
	for tries := 0; tries < 20 || !home && tries < 1000; tries++ { // what is done in the background is not always the same
		for _, key := range []string{"k", "1"} { // which the fake server answers
			for _, statement := range sentFor("shop", "me", key) {
				usual[statement] = true
				home = home || strings.Contains(statement, "mysqllock_named1")
			}
		}
	}
	f.Fuzz(func(t *testing.T, namespace, owner, key string) {
		if namespace == "" || len(namespace) > 255 || owner == "" || key == "" || len(key) > 255 {
			return
		}
		sent := sentFor(namespace, owner, key)
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
func sentFor(namespace, owner, key string) (sent []string) {
	for _, how := range rightsOf {
		fake := newFake().mysqlAnswers()
		answer := fake.answer
		fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if literal.ReplaceAllString(text, "") == literal.ReplaceAllString(sqlStripes, "") {
				text = sqlStripes // of any namespace
			}
			reply, err := answer(c, text)
			if len(reply.rows) == 3 && !strings.HasPrefix(text, "UPDATE p") { // it is none that the fake knows
				reply = fakeReply{columns: slices.Repeat([]string{"c"}, 8), rows: [][]driver.Value{slices.Repeat([]driver.Value{int64(1)}, 8)}}
			}
			return reply, err
		}
		connector, err := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{Namespace: namespace, Owner: owner, NoWait: true})
		if err != nil {
			return []string{err.Error()}
		}
		db := sql.OpenDB(connector)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_, _ = db.ExecContext(lockctx.With(ctx, key, how.holds), "UPDATE p SET stock = 1")
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
	return sent
}
