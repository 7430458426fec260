package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// tryAtOnce is how many rows one statement of Filter.Try may lock, for a moment.
const tryAtOnce = 20

const tried = "which row locks are held that the server does not show"

// tryRows finds out which rows somebody has locked of whom the server shows nothing.
func (p *picture) tryRows(ctx context.Context) error {
	hides, _ := incomplete(p.gaps, []string{row})
	if !p.asked.try || !hides && p.info.AllHolders { // MariaDB says that it hides none from a copy
		return nil
	}
	names, err := p.unshownRows(ctx)
	if err == nil {
		err = p.lockNoGaps(ctx)
	}
	for _, namespace := range slices.Sorted(maps.Keys(names)) {
		for batch := range slices.Chunk(names[namespace], tryAtOnce) {
			if err == nil {
				err = p.try(ctx, namespace, batch)
			}
		}
	}
	switch {
	case server.Missing(err): // the lock table, as readTable has noted
		return nil
	case server.Unparsed(err): // it does not know SKIP LOCKED
		p.gap(tried, "it needs MySQL 8.0, or MariaDB 10.6", "")
		return nil
	case err != nil:
		return p.tolerate(err, tried, p.grant("SELECT, UPDATE", p.table.String()))
	}
	p.allTried()
	return nil
}

// unshownRows reads the names, by namespace, of the rows that nothing shows to be locked. While a lease
// lasts nobody holds its row: a caller that locks the row asks for the lease, renews it or commits under
// it.
func (p *picture) unshownRows(ctx context.Context) (map[string][]string, error) {
	rows, err := p.query(ctx, fmt.Sprintf("SELECT namespace, name FROM %s WHERE %s AND NOT (%s) AND NOT (%s) AND name <> %s"+
		" ORDER BY namespace, name LIMIT %d",
		p.table, p.askedRows(), schema.HighWater, schema.Live(""), schema.Literal(schema.Stripes), most))
	p.full(rows, tried)
	names := make(map[string][]string)
	for _, r := range rows {
		lock := id{row, r[0], r[1]}
		held := slices.ContainsFunc(p.claims[lock], func(c claim) bool { return !c.waiting })
		if _, _, asked := p.asked.lock(lock, nil); asked && !held {
			names[r[0]] = append(names[r[0]], r[1])
		}
	}
	return names, err
}

// tryRow notes whether somebody has locked a row, if the server may not show that. If the
// account may not try, it stays unknown.
func (p *picture) tryRow(ctx context.Context, namespace, name string) error {
	hides, _ := incomplete(p.gaps, []string{row})
	shown := slices.ContainsFunc(p.claims[id{row, namespace, name}], func(c claim) bool { return !c.waiting })
	if !hides || shown {
		return nil
	}
	err := p.lockNoGaps(ctx)
	if err == nil {
		err = p.try(ctx, namespace, []string{name})
	}
	switch {
	case err == nil:
		p.allTried()
	case hidden(err) || server.Unparsed(err):
		return nil
	}
	return err
}

// lockNoGaps keeps statements from locking gaps where a row is gone.
func (p *picture) lockNoGaps(ctx context.Context) error {
	_, err := p.query(ctx, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
	return err
}

// tryEach is try where SKIP LOCKED locks nothing, nor does a statement outside of a transaction.
func (p *picture) tryEach(ctx context.Context, namespace string, names []string) error {
	for _, name := range names {
		if _, err := p.query(ctx, "BEGIN PESSIMISTIC"); err != nil {
			return err
		}
		_, err := p.query(ctx, "SELECT 1 FROM "+p.table.String()+" WHERE namespace = "+schema.Literal(namespace)+
			" AND name = "+schema.Literal(name)+" FOR UPDATE NOWAIT")
		if _, failed := p.query(ctx, "ROLLBACK"); err == nil {
			err = failed
		}
		switch {
		case server.Locked(err):
			p.claims.add(id{row, namespace, name}, p.suspect())
		case err != nil:
			return err
		}
	}
	return nil
}

// try notes which of the rows somebody has locked.
func (p *picture) try(ctx context.Context, namespace string, names []string) error {
	if p.info.Optimists {
		return p.tryEach(ctx, namespace, names)
	}
	for _, locking := range []string{" FOR UPDATE SKIP LOCKED", ""} { // then see which are there at all
		if len(names) == 0 {
			return nil
		}
		in := make([]string, len(names))
		for i, name := range names {
			in[i] = schema.Literal(name)
		}
		rows, err := p.query(ctx, "SELECT name FROM "+p.table.String()+" WHERE namespace = "+schema.Literal(namespace)+
			" AND name IN ("+strings.Join(in, ", ")+")"+locking)
		if err != nil {
			return err
		}
		found := make(map[string]bool)
		for _, r := range rows {
			found[r[0]] = true
		}
		names = slices.DeleteFunc(names, func(name string) bool { return found[name] == (locking != "") })
	}
	for _, name := range names {
		p.claims.add(id{row, namespace, name}, p.suspect())
	}
	return nil
}

// suspect is who has locked a row, if it can be only one.
func (p *picture) suspect() claim {
	if len(p.hiding) == 1 {
		return claim{conn: p.hiding[0].conn, age: p.hiding[0].age}
	}
	return claim{}
}

// allTried takes back that holders of row locks may be missing: who they are may not be
// known, but that somebody holds is.
func (p *picture) allTried() {
	p.gaps = slices.DeleteFunc(p.gaps, func(g Gap) bool { return g.What == calmRows })
	for i := range p.gaps {
		if g := &p.gaps[i]; g.What == whoRows || g.What == whoAny {
			g.holdersOf, g.Holders = nil, false
		}
	}
	if len(p.hiding) > 1 {
		var conns []uint64
		for _, t := range p.hiding {
			conns = append(conns, t.conn)
		}
		why := "MariaDB shows that only while somebody else waits for the row"
		if p.info.UsedTables {
			why = onlyTables
		}
		p.gap(whoTried, why+"; it is one of the connections "+list(conns), "")
	}
}

const whoTried = "who holds the row locks that nobody waits for"
