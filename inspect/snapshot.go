package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Filter says which locks to show. The zero value shows all locks of the namespace, and
// advisory locks of unknown namespace.
type Filter struct {
	// Keys are the only ones shown, with chains through others. A key with no visible holder or waiter
	// is a Lock without a Strategy.
	Keys []string

	AllNamespaces bool // show the locks of all namespaces; not together with Keys
	Deadlocks     bool // also count deadlocks
	Forced        bool // also show the leases that were taken away by [Inspector.Release], also those of free keys

	// Try also finds the row locks that the server does not show: those on MariaDB for
	// which nobody waits, and all of them if the account may not read the server's views.
	// It locks each row of the keys that are asked for, if nobody has locked it, for the
	// time of one statement, which takes up to 20 rows. In that moment, well below a
	// millisecond on the server, NoWait fails at these keys, an optimistic unit of work may
	// conflict, and others wait. Who has a lock that was found so is told if it can be one
	// connection only. It needs SELECT and UPDATE on the lock table, and MySQL 8.0, MariaDB
	// 10.6 or TiDB, on which each row takes three statements.
	Try bool
}

// Snapshot shows the locks, their holders and their waiters. If the account may not see
// something, or the server does not show it, that is a [Gap] and not an error.
//
// Of a lease, or of a row lock in one transaction, Holder.Least has the best bound of all Snapshots of
// the Inspector, of the same keys, in which it was seen without a break.
func (i *Inspector) Snapshot(ctx context.Context, f Filter) (*Snapshot, error) {
	if f.AllNamespaces && len(f.Keys) > 0 {
		return nil, fmt.Errorf("mysqllock: Keys are keys of one namespace: they cannot be combined with AllNamespaces")
	}
	for _, key := range f.Keys {
		if n := len(key); n == 0 || n > lockctx.MaxKey {
			return nil, fmt.Errorf("mysqllock: a key has 1 to %d bytes, and %.40q has %d", lockctx.MaxKey, key, n)
		}
	}
	var out *Snapshot
	began := time.Now()
	err := i.on(ctx, func(ctx context.Context, s *session) error {
		p, err := s.look(ctx, f)
		if err != nil {
			return err
		}
		out = &Snapshot{Time: s.now, Namespace: p.asked.namespace, NoTable: p.noTable}
		if out.Namespaces, err = s.namespaces(ctx); err != nil {
			return err
		}
		p.checkNamespace(out.Namespaces)
		out.Locks, out.beyond = p.locks()
		i.memory.follow(f, out.Locks, s.now, s.now.Add(time.Since(began)))
		out.Forced = p.forced()
		if f.Deadlocks {
			if out.Deadlocks, err = p.deadlocks(ctx); err != nil {
				return fmt.Errorf("mysqllock: counting deadlocks: %w", err)
			}
		}
		out.Gaps, out.Unseen = p.gaps, p.unseen
		return nil
	})
	return out, err
}

// deadlocks counts those that the server has broken.
func (p *picture) deadlocks(ctx context.Context) (out Known[uint64], err error) {
	rows, err := p.view.deadlocks(p, ctx)
	if err != nil || len(rows) == 0 {
		return out, err
	}
	n, err := strconv.ParseUint(rows[0][0], 10, 64)
	return Value(n), err
}

// picture is what has been read of the locks.
type picture struct {
	noTable bool // the lock table does not exist
	*session
	asked   question
	claims  claims
	wakeUps map[string][]claim // the wake-up locks of leases, by name
	rows    map[id]tableRow
	running []statement
	read    bool // running was read
	clients map[uint64]Client
	gaps    []Gap

	activity map[uint64]*Activity     // of connections that hold
	unseen   Known[int]               // see Snapshot.Unseen
	hiding   []transaction            // these, as far as they are known
	sharers  map[id][]uint64          // connections, some of them sharing a row, if it is not known which
	ages     map[uint64]time.Duration // of transactions on MariaDB, by connection
	untold   bool                     // the table lacks columns, or the account may not read them
	unlisted bool                     // the server lists no named locks: it was asked for single ones
}

// tableRow is a key's row in the lock table.
type tableRow struct {
	id
	owner     string // of the lease, live or not
	token     uint64
	remaining time.Duration // of the lease; 0 where none is live
	expires   time.Time
	versioned bool

	since, ttl, renewed Known[time.Duration] // of the lease: see Holder
	ttlBefore           Known[time.Duration] // of the lease before, if this one has told no renewal
	forced              string               // see schema.ReadForced
}

func (s *session) picture(f Filter) *picture {
	p := &picture{
		session: s, claims: make(claims), wakeUps: make(map[string][]claim), rows: make(map[id]tableRow),
		unseen: Value(0), sharers: make(map[id][]uint64), ages: make(map[uint64]time.Duration),
	}
	p.asked = question{namespace: s.namespace, keys: f.Keys, try: f.Try, forced: f.Forced}
	if f.AllNamespaces {
		p.asked.namespace = ""
	}
	return p
}

func (s *session) look(ctx context.Context, f Filter) (*picture, error) {
	p := s.picture(f)
	for _, read := range []func(context.Context) error{
		p.waits, p.readTable, p.tryRows, p.matchWakeUps, p.lookAgain, p.readLocked, p.readClients, p.readActivity,
	} {
		if err := read(ctx); err != nil {
			return nil, fmt.Errorf("mysqllock: reading the holders and waiters: %w", err)
		}
	}
	return p, nil
}

// waits reads who has the server's locks, and who waits for them.
func (p *picture) waits(ctx context.Context) error {
	if err := p.view.rowLocks(p, ctx); err != nil {
		return err
	}
	return p.view.namedLocks(p, ctx)
}

// gap notes that something is not shown.
func (p *picture) gap(what, why, remedy string) {
	g := Gap{What: what, Why: why, Remedy: remedy}
	g.holdersOf, g.waitersOf = missing(what)
	if slices.Contains(g.waitersOf, row) {
		p.unseen = Known[int]{}
	}
	p.addGap(g)
}

func (p *picture) addGap(g Gap) {
	g.Holders, g.Waiters = len(g.holdersOf) > 0, len(g.waitersOf) > 0
	p.gaps = append(p.gaps, g)
}

// missing returns strategies whose holders and waiters may be missing if what is not shown.
func missing(what string) (holdersOf, waitersOf []string) {
	switch what {
	case whoRows:
		return []string{row}, []string{row}
	case whoAny:
		return []string{row}, []string{row, lease, advisory}
	case whoNames, someNames:
		return []string{advisory}, []string{lease, advisory}
	case leases: // waiters have only a hash of the key, which is told by the table
		return []string{lease}, []string{lease}
	case freedLeases:
		return nil, []string{lease}
	case calmRows, tried:
		return []string{row}, nil
	case polling:
		return nil, []string{lease}
	case calmNames:
		return []string{advisory}, nil
	case otherWork:
		return nil, []string{row, lease, advisory}
	}
	return nil, nil
}

// complete notes on a lock which others may hold it, or wait for it, than those seen.
func (p *picture) complete(l *Lock) {
	var of []string // any, if it is not known which strategy is meant
	if l.Strategy != "" {
		of = append(of, l.Strategy)
	}
	holders, waiters := incomplete(p.gaps, of)
	switch {
	case len(l.Holders.List) == 0: // what is waited for may have been granted while this was read
		holders = holders || len(l.Waiters.List) > 0
	case l.Strategy == row && l.Holders.List[0].ConnectionID == 0: // nor is it known how many share it
		holders = true
	case !l.Holders.List[0].Shared: // nobody holds it beside that one
		holders = false
	}
	// A caller without a connection to wait on asks again and again, and waits for nothing in the server.
	waiters = waiters || l.Strategy == lease || l.Strategy == advisory
	l.Holders.More, l.Waiters.More = holders, waiters
	l.InOrder = l.InOrder && !waiters // one that is not seen may be before them
}

// blind notes that locks are held which cannot be shown.
func (p *picture) blind(locks int) {
	p.addGap(Gap{
		What: fmt.Sprintf("the keys of %d locks", locks), Why: "the rows are not in the buffer pool, from which the server tells them",
		holdersOf: []string{row}, waitersOf: []string{row},
	})
}

// tolerate makes a gap of an error that the rest of the snapshot survives.
func (p *picture) tolerate(err error, what, remedy string) error {
	switch {
	case err == nil:
		return nil
	case hidden(err):
		p.gap(what, "the account may not see it: "+err.Error(), remedy)
		return nil
	case server.Unlisted(err):
		p.gap(what, "performance_schema is off, and the server cannot list what a connection runs: "+err.Error(), turnOn)
		return nil
	case server.Interrupted(err):
		p.gap(what, fmt.Sprintf("the server did not answer within %v, or a program is altering the lock table: %v", questionBound, err), "")
		return nil
	}
	return err
}

// grant is a statement that gives the account a privilege.
func (s *session) grant(privilege, on string) string {
	return "GRANT " + privilege + " ON " + on + " TO " + s.account
}

// full notes that there may be more than were read.
func (p *picture) full(rows [][]string, what string) {
	if len(rows) >= most {
		p.gap(what, fmt.Sprintf("only the first %d are read", most), "ask for single keys")
	}
}

const (
	columns = "namespace, name, COALESCE(owner, ''), token, versioned, CAST(expires AS CHAR)"
	told    = "IF(renewed_token = token, TIMESTAMPDIFF(MICROSECOND, granted_at, UTC_TIMESTAMP(6)), NULL)," +
		" IF(renewed_token = token, ttl, NULL)," +
		" IF(renewed_token = token, TIMESTAMPDIFF(MICROSECOND, expires, UTC_TIMESTAMP(6)) + CAST(ttl AS SIGNED), NULL)," +
		" released, IF(renewed_token = token, NULL, ttl)"
	toldNothing = "NULL, NULL, NULL, NULL, NULL"
	wasForced   = "released IS NOT NULL"
	leases      = "leases, and the tokens of keys"
	freedLeases = "the waiters for leases that were released just now"
	otherWork   = "what other connections run"
	noTable     = "the lock table does not exist: its name is wrong, it was dropped, or no program has made it yet"
)

// readTable reads the rows of live leases, or of the keys that are asked for.
func (p *picture) readTable(ctx context.Context) error {
	where := p.askedRows()
	if len(p.asked.keys) == 0 {
		live := schema.Live("")
		if p.asked.forced {
			live = "(" + live + " OR " + wasForced + ")"
		}
		where += " AND " + live + " AND NOT (" + schema.HighWater + ")"
	}
	found, err := p.readRows(ctx, p.table.String(), fmt.Sprintf("WHERE %s LIMIT %d", where, most))
	p.full(found, leases)
	if server.Missing(err) {
		return p.noteNoTable(ctx)
	}
	if server.Interrupted(err) {
		p.addGap(Gap{
			What: "who waits for the lock table itself", Why: "a program alters or locks it, or waits to, and all others wait behind that",
			Remedy: "SHOW PROCESSLIST: Waiting for table metadata lock", waitersOf: []string{row, lease},
		})
	}
	return p.tolerate(err, leases, p.grant("SELECT", p.table.String()))
}

// noteNoTable notes that the lock table does not exist, and which tables look like one.
func (p *picture) noteNoTable(ctx context.Context) error {
	p.gaps = slices.DeleteFunc(p.gaps, func(g Gap) bool { return g.What == calmRows }) // of other tables
	p.hiding = nil
	alike, err := p.lockTables(ctx)
	remedy := "the right name of the table, in place of " + p.table.String()
	if len(alike) > 0 {
		remedy += "; lock tables of this database: " + strings.Join(alike, ", ")
	}
	p.gap(leases, noTable, remedy)
	p.noTable = true
	return p.tolerate(err, "other lock tables", "")
}

// askedRows is the condition for the rows of the keys that are asked for, with a few others.
func (p *picture) askedRows() string {
	if p.asked.namespace == "" {
		return "TRUE"
	}
	where := "namespace = " + schema.Literal(p.asked.namespace)
	if len(p.asked.keys) > 0 {
		var in []string
		for _, key := range p.asked.keys {
			in = append(in, schema.Literal(p.asked.row(key)))
		}
		// What is below x'01' are slots, stripes, and how many of these there are.
		where += " AND (name IN (" + strings.Join(in, ", ") + ") OR name < x'01')"
	}
	return where
}

func (p *picture) readRows(ctx context.Context, from, tail string) ([][]string, error) {
	read := func(more string) ([][]string, error) {
		return p.query(ctx, "SELECT "+columns+", "+schema.Remaining("")+", "+more+" FROM "+from+" "+tail)
	}
	what := told
	if p.untold {
		what = toldNothing
	}
	rows, err := read(what)
	if server.NoColumn(err) && !p.untold {
		p.untold = true
		tail = strings.Replace(tail, wasForced, "FALSE", 1)
		rows, err = read(toldNothing)
	}
	for _, r := range rows {
		token, _ := strconv.ParseUint(r[3], 10, 64)
		t := tableRow{
			id: id{lease, r[0], r[1]}, owner: r[2], token: token, versioned: r[4] == "1",
			expires: moment(r[5]),
		}
		if r[6] != "0" {
			t.remaining = max(t.expires.Sub(p.now), time.Microsecond)
		}
		t.forced = r[10]
		t.ttlBefore = positive(micros(r[11]))
		if t.since = positive(p.age(r[7])); r[8] != "" {
			t.ttl, t.renewed = Value(micros(r[8])), Value(max(0, p.age(r[9])))
		}
		if p.rows[t.id] = t; t.name == schema.Stripes {
			p.asked.stripes = int(token)
		}
	}
	return rows, err
}

func micros(s string) time.Duration {
	n, _ := strconv.ParseInt(s, 10, 64)
	return time.Duration(n) * time.Microsecond
}

// matchWakeUps finds the leases whose wake-up locks connections hold, or wait for. The
// name of a wake-up lock has only a hash of the key.
func (p *picture) matchWakeUps(ctx context.Context) error {
	if len(p.wakeUps) == 0 {
		return nil
	}
	matched := make(map[string]id)
	match := func() {
		for lock := range p.rows {
			if name := lockname.OfWakeUp(lock.namespace, lock.name); p.wakeUps[name] != nil {
				matched[name] = lock
			}
		}
	}
	match()
	var lacking []string
	for name, list := range p.wakeUps {
		if _, ok := matched[name]; !ok && slices.ContainsFunc(list, func(c claim) bool { return c.waiting }) {
			lacking = append(lacking, schema.Literal(strings.TrimPrefix(name, lockname.WakeUp)))
		}
	}
	// The lease was released just now; or its key was not asked for, though a chain from one that was
	// may lead there; or it is in another table.
	if len(lacking) > 0 {
		where := ""
		if p.asked.namespace != "" {
			where = "namespace = " + schema.Literal(p.asked.namespace) + " AND "
		}
		_, err := p.readRows(ctx, p.table.String(), fmt.Sprintf("WHERE %sLEFT(SHA2(CONCAT(namespace, x'00', name), 256), 40) IN (%s) LIMIT %d",
			where, strings.Join(lacking, ", "), most))
		if err := p.tolerate(err, freedLeases, ""); err != nil {
			return err
		}
		match()
	}
	for name, lock := range matched {
		for _, one := range p.wakeUps[name] {
			p.claims.add(lock, one)
		}
	}
	return nil
}

// between is longer than a waiter takes from one wait in the server to the next.
const between = 80 * time.Millisecond

// lookAgain looks a second time for waiters, for keys where the first look has seen none. Who
// waits asks again after a TTL at the latest, for a lease every few seconds, and for one of several
// slots every quarter of a second: meanwhile the server shows no wait.
func (p *picture) lookAgain(ctx context.Context) error {
	calm, seen := make(map[string][]id), make(map[string]bool) // by key
	note := func(lock id) {
		m, _ := keyrow.Read(lock.name)
		key := lock.strategy + lock.namespace + "\x00" + cmp.Or(m.Key, lock.name)
		calm[key] = append(calm[key], lock)
		seen[key] = seen[key] || slices.ContainsFunc(p.claims[lock], func(c claim) bool { return c.waiting })
	}
	for lock, r := range p.rows {
		if r.remaining > 0 {
			note(lock)
		}
	}
	for lock := range p.claims {
		if lock.strategy != lease {
			note(lock)
		}
	}
	maps.DeleteFunc(calm, func(key string, _ []id) bool { return seen[key] })
	if len(calm) == 0 {
		return nil
	}
	select {
	case <-time.After(between):
	case <-ctx.Done():
		return ctx.Err()
	}
	again := p.session.picture(Filter{AllNamespaces: true})
	if err := again.waits(ctx); err != nil {
		return err
	}
	for _, locks := range calm {
		for _, lock := range locks {
			list := again.claims[lock]
			if lock.strategy == lease {
				list = again.wakeUps[lockname.OfWakeUp(lock.namespace, lock.name)]
			}
			for _, c := range list {
				if c.waiting {
					p.claims.add(lock, c)
				}
			}
		}
	}
	return nil
}

// readLocked reads the rows of keys that are locked, and those of their second slots, which
// tell that these keys have slots.
func (p *picture) readLocked(ctx context.Context) error {
	var lines []string
	read := func(namespace, name string) {
		asked := p.asked.namespace == "" || p.asked.namespace == namespace
		if asked && p.rows[id{lease, namespace, name}].name == "" && len(lines) < 1000 {
			lines = append(lines, "SELECT "+schema.Literal(namespace)+" AS s, "+schema.Literal(name)+" AS k")
		}
	}
	for lock := range p.claims {
		if lock.strategy == row {
			read(lock.namespace, lock.name)
		}
		if m, ok := keyrow.Read(lock.name); lock.strategy != advisory && ok && m.Slot == 0 {
			read(lock.namespace, keyrow.SlotName(lock.name, 1))
		}
	}
	for lock := range p.rows {
		if m, ok := keyrow.Read(lock.name); ok && m.Slot == 0 && len(p.asked.keys) == 0 {
			read(lock.namespace, keyrow.SlotName(lock.name, 1))
		}
	}
	if len(lines) == 0 || slices.ContainsFunc(p.gaps, func(g Gap) bool { return g.What == leases }) {
		return nil
	}
	_, err := p.readRows(ctx, "("+strings.Join(lines, " UNION ALL ")+") d STRAIGHT_JOIN "+p.table.String()+
		" ON namespace = s AND name = k", "")
	return p.tolerate(err, leases, "")
}

// readClients reads to which clients the connections belong.
func (p *picture) readClients(ctx context.Context) error {
	p.clients = make(map[uint64]Client)
	ids := p.claims.connections()
	if len(ids) == 0 {
		return nil
	}
	var in []string
	for _, n := range ids {
		in = append(in, strconv.FormatUint(n, 10))
	}
	list := strings.Join(in, ", ")
	note := func(n, user, host string) {
		conn, _ := strconv.ParseUint(n, 10, 64)
		p.clients[conn] = Client{User: user, Host: host}
	}
	var threads [][]string
	if p.schema && p.info.AllHolders {
		var err error
		threads, err = p.query(ctx, "SELECT PROCESSLIST_ID, PROCESSLIST_USER, PROCESSLIST_HOST FROM performance_schema.threads"+
			" WHERE PROCESSLIST_ID IN ("+list+")")
		if err != nil && !hidden(err) {
			return err
		}
	}
	for _, r := range threads {
		note(r[0], r[1], r[2])
	}
	if len(threads) == 0 {
		running, err := p.statements(ctx)
		if err != nil {
			return err
		}
		for _, s := range running {
			note(strconv.FormatUint(s.conn, 10), s.user, s.host)
		}
	}
	return p.readPrograms(ctx, list)
}

// readPrograms reads what the connections of list say of themselves.
func (p *picture) readPrograms(ctx context.Context, list string) error {
	const what = "the programs of holders and waiters"
	if !p.schema && !p.info.UsedTables {
		p.gap(what, "performance_schema is off", turnOn+"; or ss -tnp, on the client's host, for the port from which it is connected")
		return nil
	}
	read := func(table string) ([][]string, error) {
		return p.query(ctx, "SELECT PROCESSLIST_ID, ATTR_NAME, ATTR_VALUE FROM performance_schema."+table+
			" WHERE PROCESSLIST_ID IN ("+list+") AND ATTR_NAME IN ('mysqllock_owner', 'program_name', '_pid') ORDER BY ATTR_NAME DESC")
	}
	rows, err := read("session_connect_attrs")
	if hidden(err) {
		p.gap(what+" as other accounts", "the account may not read performance_schema", p.grant("SELECT", "performance_schema.*"))
		rows, err = read("session_account_connect_attrs") // those of the same account
	}
	if hidden(err) {
		return nil
	}
	for _, r := range rows {
		n, _ := strconv.ParseUint(r[0], 10, 64)
		c := p.clients[n]
		switch r[1] {
		case "program_name", "mysqllock_owner": // the latter is preferred, and comes later
			c.Program = r[2]
		case "_pid":
			c.PID, _ = strconv.Atoi(r[2])
		}
		p.clients[n] = c
	}
	return err
}

// locks are those that are asked for, and others, to which chains may lead.
func (p *picture) locks() (asked, beyond []Lock) {
	var bases []string
	for lock := range p.rows {
		bases = append(bases, lock.name)
	}
	held := p.claims.held()
	ids := make(map[id]bool)
	for lock := range p.claims {
		ids[lock] = true
	}
	for lock, r := range p.rows {
		if r.remaining > 0 {
			ids[lock] = true
		}
	}
	var all []Lock
	wanted := make(map[id]bool)
	for lock := range ids {
		l, here, asked := p.asked.lock(lock, bases)
		if !here {
			continue
		}
		r := p.rows[id{lease, lock.namespace, lock.name}]
		if lock.strategy != advisory {
			p.ofRow(&l, lock)
		}
		list := p.claims[lock]
		if lock.strategy == lease {
			if r.remaining > 0 {
				l.Expires, l.Remaining = r.expires, r.remaining
				l.Holders.List = []Holder{leaseHolder(r)}
			}
			list = p.atWakeUp(&l, list)
		}
		l.fill(list, p.clients)
		if len(l.Holders.List)+len(l.Waiters.List) == 0 {
			continue
		}
		p.complete(&l)
		if lock.strategy == advisory {
			more, _ := incomplete(p.gaps, []string{advisory})
			for i, h := range l.Holders.List {
				l.Holders.List[i].Locks = Count{held[h.ConnectionID], more || p.unlisted}
			}
		}
		wanted[id{l.Strategy, l.Namespace, l.Name}] = asked
		all = append(all, l)
	}
	p.numberSlots(all)
	p.link(all)
	for _, l := range all {
		if wanted[id{l.Strategy, l.Namespace, l.Name}] {
			asked = append(asked, l)
		} else {
			beyond = append(beyond, l)
		}
	}
	if n := untold(asked); n > 0 {
		p.gap(fmt.Sprintf("the keys of %d locks", n), "their names have only a hash of namespace and key:"+
			" these are long, or have characters other than lower-case letters, digits and _.:-",
			"ask for single keys: then the names are known")
	}
	asked = append(asked, p.free(asked)...)
	slices.SortFunc(asked, func(a, b Lock) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Stripe, b.Stripe),
			cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.Strategy, b.Strategy), cmp.Compare(a.Name, b.Name))
	})
	return asked, beyond
}

// numberSlots notes which locks are slots of a key that has several.
func (p *picture) numberSlots(locks []Lock) {
	slots := map[int]bool{1: true} // that there are of any key
	for _, l := range locks {
		slots[l.Slot] = true
	}
	delete(slots, 0)
	shown := make(map[id]bool)
	for _, l := range locks {
		shown[id{lease, l.Namespace, l.Name}] = l.Strategy != advisory
	}
	for i, l := range locks {
		locks[i].Slotted = l.Slot > 0
		for slot := range slots {
			other := id{lease, l.Namespace, keyrow.SlotName(l.Name, slot)}
			if l.Strategy != advisory && l.Slot == 0 && (shown[other] || p.rows[other].name != "") {
				locks[i].Slotted = true
			}
		}
		locks[i].InOrder = l.InOrder && !locks[i].Slotted                           // who waits for a slot waits for any
		locks[i].Waiters.More = l.Waiters.More || locks[i].Slotted && !p.info.Kills // they ask again and again
	}
}

// untold counts the locks whose name does not tell the key.
func untold(locks []Lock) (n int) {
	for _, l := range locks {
		if l.Key == "" && l.Stripe < 0 {
			n++
		}
	}
	return n
}

// atWakeUp finds out which connection holds the wake-up lock of a lease: the holder of
// the lease, whose connection then tells more of it, or the first waiter, if the holder
// has lost it.
func (p *picture) atWakeUp(l *Lock, list []claim) []claim {
	var out []claim
	for _, one := range list {
		who := p.clients[one.conn]
		switch {
		case one.waiting:
			out = append(out, one)
		case len(l.Holders.List) == 0 || who.Program == "":
		case who.Program == l.Holders.List[0].Program:
			h := &l.Holders.List[0]
			h.User, h.Host, h.PID = who.User, who.Host, who.PID
		default:
			out = append(out, claim{conn: one.conn, waiting: true})
		}
	}
	return out
}

// ofRow notes what the lock's row in the lock table says.
func (p *picture) ofRow(l *Lock, lock id) {
	r := p.rows[id{lease, lock.namespace, lock.name}]
	unread := slices.ContainsFunc(p.gaps, func(g Gap) bool { return g.What == leases })
	if r.name != "" || !unread && len(p.asked.keys) > 0 { // else there is no row, or it is not committed yet
		l.Token, l.Versioned = Value(r.token), Value(r.versioned)
		l.Used = Value(r.name != "")
	}
	if f, ok := schema.ReadForced(r.forced); ok {
		l.Forced = &Forced{f.Token, f.At, f.Account, f.Process, f.Reason}
	}
}

// forced returns the keys whose lease was taken away, if these are asked for.
func (p *picture) forced() (out []Lock) {
	if !p.asked.forced {
		return nil
	}
	for lock, r := range p.rows {
		f, ok := schema.ReadForced(r.forced)
		l, here, asked := p.asked.lock(lock, nil)
		if ok && here && asked {
			l.Forced = &Forced{f.Token, f.At, f.Account, f.Process, f.Reason}
			out = append(out, l)
		}
	}
	slices.SortFunc(out, func(a, b Lock) int { return a.Forced.Time.Compare(b.Forced.Time) })
	return out
}

// free returns the keys of the question that are not among shown.
func (p *picture) free(shown []Lock) (out []Lock) {
	for _, key := range p.asked.keys {
		name := p.asked.row(key)
		if slices.ContainsFunc(shown, func(l Lock) bool { return l.Name == name || l.Key == key }) {
			continue
		}
		l, _, _ := p.asked.lock(id{"", p.asked.namespace, name}, nil)
		l.Key = key
		row := id{lease, p.asked.namespace, name}
		p.ofRow(&l, row)
		if r := p.rows[row]; r.owner != "" && r.remaining == 0 {
			if h := leaseHolder(r); !h.Left {
				l.Lapsed = &h
			}
		}
		p.complete(&l)
		out = append(out, l)
	}
	return out
}

// statement is a running statement, or an idle connection.
type statement struct {
	conn       uint64
	user, host string
	order      uint64 // 0 if the server does not count statements
	age        time.Duration
	state      string
	text       string
}

// statements reads the process list. Without privileges it has only the connections of
// the same account.
func (p *picture) statements(ctx context.Context) ([]statement, error) {
	if p.read {
		return p.running, nil
	}
	times := cmp.Or(p.view.times, "0, GREATEST(CAST(TIME AS SIGNED) - 1, 0) * 1000000") // in whole seconds of the clock
	rows, err := p.query(ctx, fmt.Sprintf("SELECT ID, USER, HOST, %s, STATE,"+
		" IF(INFO LIKE '%%GET_LOCK(''%s%%' OR INFO LIKE '%% name = x''%%', LEFT(INFO, 20000), '')"+
		" FROM %s WHERE ID <> CONNECTION_ID()", times, lockname.Any, cmp.Or(p.view.connections, server.Connections)))
	if err := p.tolerate(err, otherWork, ""); err != nil {
		return nil, err
	}
	for _, r := range rows {
		conn, _ := strconv.ParseUint(r[0], 10, 64)
		order, _ := strconv.ParseUint(r[3], 10, 64)
		p.running = append(p.running, statement{conn, r[1], r[2], order, p.age(r[4]), r[5], r[6]})
	}
	p.read = true
	return p.running, nil
}

// The texts of statements that wait for a lock.
var (
	rowWait = regexp.MustCompile("(`[^`]+(?:``[^`]*)*`\\.`[^`]+`) (?:[a-z] )?WHERE (?:[a-z]\\.)?namespace = x'([0-9a-f]*)'" +
		" AND (?:[a-z]\\.)?name = x'([0-9a-f]+)' (?:LIMIT 1 )?(FOR UPDATE|FOR SHARE|LOCK IN SHARE MODE)")
	noWait   = regexp.MustCompile(`NOWAIT|SKIP LOCKED|innodb_lock_wait_timeout = 0`)
	nameWait = regexp.MustCompile(`GET_LOCK\('(mysqllock[^']*)'`)
)

// waitersByText notes the connections that run a statement which waits for rows. Of a
// statement for several rows it does not know for which one it waits.
func (p *picture) waitersByText(ctx context.Context) error {
	running, err := p.statements(ctx)
	for _, s := range running {
		if noWait.MatchString(s.text) {
			continue
		}
		for _, m := range rowWait.FindAllStringSubmatch(s.text, -1) {
			namespace, ok := unhex("0x" + m[2])
			name, ok2 := unhex("0x" + m[3])
			if ok && ok2 && m[1] == p.table.String() {
				waits := claim{conn: s.conn, waiting: true, shared: m[4] != "FOR UPDATE", order: s.order, age: s.age}
				p.claims.add(id{row, namespace, name}, waits.saying(s.text))
			}
		}
	}
	return err
}

// namedWaitersByText notes the waiters for named locks.
func (p *picture) namedWaitersByText(ctx context.Context) error {
	running, err := p.statements(ctx)
	for _, s := range running {
		if m := nameWait.FindStringSubmatch(s.text); m != nil && s.state == "User lock" {
			p.named(m[1], claim{conn: s.conn, waiting: true, order: s.order, age: s.age}.saying(s.text))
		}
	}
	return err
}

// named notes a claim to a named lock.
func (p *picture) named(name string, one claim) {
	switch {
	case lockname.IsAdvisory(name):
		p.claims.add(id{strategy: advisory, name: name}, one)
	case strings.HasPrefix(name, lockname.WakeUp):
		p.wakeUps[name] = append(p.wakeUps[name], one)
	}
}

// askForNames asks for the holder of each named lock that has waiters, or that the caller
// asks for. It is for servers that do not list these locks.
func (p *picture) askForNames(ctx context.Context) error {
	var names []string
	for lock := range p.claims {
		if lock.strategy == advisory {
			names = append(names, lock.name)
		}
	}
	for _, key := range p.asked.keys {
		names = append(names, lockname.OfAdvisory(p.asked.namespace, key))
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !ourName.MatchString(name) })
	slices.Sort(names)
	names = slices.Compact(names)
	for batch := range slices.Chunk(names, 200) {
		rows, err := p.query(ctx, "SELECT IS_USED_LOCK(_utf8mb4'"+strings.Join(batch, "'), IS_USED_LOCK(_utf8mb4'")+"')")
		if err != nil {
			return err
		}
		for i, name := range batch {
			if conn, _ := strconv.ParseUint(rows[0][i], 10, 64); conn != 0 {
				p.named(name, claim{conn: conn, age: p.ages[conn]})
			}
		}
	}
	return nil
}
