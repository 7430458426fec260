package chaos

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// The bank. Each key has an account with two balances. A transfer reads it under the
// lock, decides, and writes what it decided as absolute values; a trigger writes
// into the ledger what that replaced. So who writes what he decided on outdated
// balances is seen, however the money adds up. Here its database is called bank.
var bank = []string{
	`CREATE TABLE bank.account (k VARCHAR(64) PRIMARY KEY, seq BIGINT UNSIGNED NOT NULL, a BIGINT NOT NULL, b BIGINT NOT NULL, op VARCHAR(64) NOT NULL) ENGINE=InnoDB`,
	`CREATE TABLE bank.ledger (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, op VARCHAR(64) NOT NULL, k VARCHAR(64) NOT NULL,
		seq BIGINT UNSIGNED NOT NULL, a BIGINT NOT NULL, b BIGINT NOT NULL,
		old_seq BIGINT UNSIGNED NOT NULL, old_a BIGINT NOT NULL, old_b BIGINT NOT NULL, KEY (k)) ENGINE=InnoDB`,
	`CREATE TABLE bank.alive (id INT PRIMARY KEY, told VARCHAR(64)) ENGINE=InnoDB`, // to see whether a node takes writes
	`CREATE TRIGGER bank.entry AFTER UPDATE ON bank.account FOR EACH ROW INSERT INTO bank.ledger (op, k, seq, a, b, old_seq, old_a, old_b)
		VALUES (NEW.op, NEW.k, NEW.seq, NEW.a, NEW.b, OLD.seq, OLD.a, OLD.b)`,
}

const capital = 1000 // in each account, of either balance

// openBank makes the tables in a database, with the accounts of keys.
func openBank(ctx context.Context, db *sql.DB, database string, keys []string) error {
	for _, statement := range bank {
		if _, err := db.ExecContext(ctx, strings.ReplaceAll(statement, "bank.", database+".")); err != nil {
			return err
		}
	}
	for _, key := range keys {
		if _, err := db.ExecContext(ctx, "INSERT INTO "+database+".account VALUES (?, 0, ?, ?, '')", key, capital, capital); err != nil {
			return err
		}
	}
	return nil
}

// account is one state of an account.
type account struct {
	key  string
	seq  uint64
	a, b int64
}

// entry is a line of the ledger.
type entry struct {
	op      string
	is, was account
}

// books is what is committed.
type books struct {
	entries  []entry // of each account in its order
	accounts []account
	written  map[string]uint64 // which state, by operation and key
}

// readBooks reads all of it as of one moment.
func readBooks(ctx context.Context, db *sql.DB, database string) (*books, error) {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	b := &books{written: make(map[string]uint64)}
	rows, err := tx.QueryContext(ctx, "SELECT op, k, seq, a, b, old_seq, old_a, old_b FROM "+database+".ledger ORDER BY old_seq, seq, id")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var e entry
		if err := rows.Scan(&e.op, &e.is.key, &e.is.seq, &e.is.a, &e.is.b, &e.was.seq, &e.was.a, &e.was.b); err != nil {
			return nil, err
		}
		e.was.key = e.is.key
		b.add(e)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	rows, err = tx.QueryContext(ctx, "SELECT k, seq, a, b FROM "+database+".account")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var a account
		if err := rows.Scan(&a.key, &a.seq, &a.a, &a.b); err != nil {
			return nil, err
		}
		b.accounts = append(b.accounts, a)
	}
	return b, rows.Err()
}

func (b *books) add(e entry) {
	b.entries = append(b.entries, e)
	b.written[e.op+"\x00"+e.is.key] = e.is.seq
}

// has reports whether the transfer's write of the account is committed.
func (b *books) has(op, key string) bool { return b.written[op+"\x00"+key] > 0 }

// banks reports whether there is an account of that key.
func (b *books) banks(key string) bool {
	return slices.ContainsFunc(b.accounts, func(a account) bool { return a.key == key })
}

// overwritten returns the commits that were decided on a state that was not the
// newest any more: lost updates.
func (b *books) overwritten(h *history) (wrong []violation) {
	commits, ends := make(map[string]event), make(map[string]event)
	for _, e := range h.events {
		switch e.Kind {
		case kindCommit:
			commits[e.Op] = e
		case kindEnd:
			ends[e.Op] = e
		}
	}
	writers := make(map[account]string)
	for _, e := range b.entries {
		writers[e.is] = e.op
	}
	last := make(map[string]entry)
	for _, e := range b.entries {
		// A line that was written without its account says what its writer had read.
		stale := last[e.is.key].is.seq > 0 && last[e.is.key].was.seq == e.was.seq && !b.banks(e.is.key)
		last[e.is.key] = e
		if e.is.seq != e.was.seq+1 || stale {
			other := writers[e.was]
			wrong = append(wrong, violation{Job: commits[e.op].Job, At: commits[e.op].Call, Text: fmt.Sprintf("%s wrote state %d of %s over state %d, which is of %s (%s %s)",
				e.op, e.is.seq, e.is.key, e.was.seq, other, ends[other].Result, ends[other].Error)})
		}
	}
	return wrong
}

// check returns where the books differ from what the clients know.
func (b *books) check(h *history) (wrong []violation) {
	commits, tries, ends := make(map[string][]event), make(map[string]event), make(map[string]event)
	jobs := make(map[string]string)
	for _, e := range h.events {
		switch e.Kind {
		case kindTry:
			tries[e.Op] = e
		case kindCommit:
			commits[e.Op] = append(commits[e.Op], e)
			jobs[e.Key] = e.Job
		case kindEnd:
			ends[e.Op] = e
		}
	}
	say := func(op string, format string, args ...any) {
		wrong = append(wrong, violation{Job: tries[op].Job, At: tries[op].Call, Text: fmt.Sprintf("%s, which ended as %q (%s), ", op, ends[op].Result, ends[op].Error) + fmt.Sprintf(format, args...)})
	}
	for op, end := range ends {
		if end.Result != done {
			continue
		}
		for _, c := range commits[op] {
			if !b.has(op, c.Key) {
				say(op, "is not in the ledger of %s", c.Key)
			}
		}
	}
	times := make(map[string]int)
	last := make(map[string]account)
	for _, e := range b.entries {
		end, ended := ends[e.op]
		tried := slices.ContainsFunc(commits[e.op], func(c event) bool { return c.Key == e.is.key && (c.Seq == e.is.seq || c.Seq == 0) })
		switch {
		case !tried:
			say(e.op, "is in the ledger of %s, but nobody has tried to commit that", e.is.key)
		case ended && end.Result != done && end.Result != unknown:
			say(e.op, "is in the ledger of %s", e.is.key)
		}
		if times[e.op+e.is.key]++; times[e.op+e.is.key] == 2 {
			say(e.op, "is in the ledger of %s twice", e.is.key)
		}
		if before, is := last[e.is.key]; is && before != e.was {
			wrong = append(wrong, violation{Job: jobs[e.is.key], At: tries[e.op].Call, Text: fmt.Sprintf("%s replaced another state of %s than its predecessor made", e.op, e.is.key), Order: true})
		}
		last[e.is.key] = e.is
	}
	sum := int64(0)
	for _, a := range b.accounts {
		sum += a.a + a.b
		if l, is := last[a.key]; is && l != a {
			wrong = append(wrong, violation{Job: jobs[a.key], Text: fmt.Sprintf("%s is %+v, but by the ledger %+v", a.key, a, l), Order: true})
		}
	}
	if want := int64(2 * capital * len(b.accounts)); sum != want {
		wrong = append(wrong, violation{Text: fmt.Sprintf("the balances sum up to %d, not %d", sum, want)})
	}
	return wrong
}
