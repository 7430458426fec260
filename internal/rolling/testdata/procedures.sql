CREATE TABLE IF NOT EXISTS `mysqllock` (
  namespace VARBINARY(255) NOT NULL,
  name VARBINARY(255) NOT NULL,
  owner VARBINARY(255) NULL,
  token BIGINT UNSIGNED NOT NULL DEFAULT 0,
  expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00',
  versioned TINYINT UNSIGNED NOT NULL DEFAULT 0,
  granted_at DATETIME(6) NULL,
  ttl BIGINT UNSIGNED NULL,
  renewed_token BIGINT UNSIGNED NULL,
  released VARBINARY(2000) NULL,
  PRIMARY KEY (namespace, name)
) ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key';
INSERT IGNORE INTO `mysqllock` (namespace, name) VALUES (x'', x'');
DELIMITER //
CREATE PROCEDURE `mysqllock_lock2`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_shared BOOL, p_quiet BIGINT UNSIGNED,
  p_seconds INT UNSIGNED, p_level INT, p_reads BOOL)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_quiet BOOL;
  IF p_seconds > 0 THEN SET @mysqllock_waits = @@SESSION.wait_timeout, SESSION wait_timeout = LEAST(@@SESSION.wait_timeout, p_seconds); END IF;
  CASE p_level
    WHEN 1 THEN SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    WHEN 2 THEN SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    WHEN 4 THEN SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
    WHEN 6 THEN SET TRANSACTION ISOLATION LEVEL SERIALIZABLE;
    ELSE BEGIN END;
  END CASE;
  IF p_reads THEN START TRANSACTION READ ONLY; ELSE START TRANSACTION; END IF;
  IF p_name IS NULL THEN SET v_quiet = TRUE;
  ELSEIF p_shared THEN
    SELECT owner IS NULL AND versioned = 0 AND token <= p_quiet AND CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF') INTO v_quiet
      FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR SHARE NOWAIT;
  ELSE
    SELECT owner IS NULL AND versioned = 0 AND token <= p_quiet AND CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF') INTO v_quiet
      FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR UPDATE NOWAIT;
  END IF;
  IF v_quiet IS NOT TRUE THEN BEGIN
    DECLARE v_token BIGINT UNSIGNED;
    DECLARE v_owner VARBINARY(255);
    DECLARE v_versioned BOOL;
    SELECT token, owner, versioned INTO v_token, v_owner, v_versioned
      FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR SHARE;
    IF v_owner IS NOT NULL THEN ROLLBACK; END IF;
    SELECT CONNECTION_ID(), v_token, v_owner, v_versioned, @@read_only, @@innodb_read_only FROM DUAL WHERE v_token IS NOT NULL;
  END; END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_done3`(p_namespace VARBINARY(255), p_leases LONGTEXT CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_held INT;
  SELECT /*+ SET_VAR(sql_big_selects = 1) */ COUNT(*) INTO v_held FROM JSON_TABLE(p_leases, _utf8mb4'$[*]' COLUMNS (n VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[0]', k BIGINT UNSIGNED PATH _utf8mb4'$[1]', o VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[2]')) d
    STRAIGHT_JOIN `mysqllock` r ON r.namespace = p_namespace AND r.name = UNHEX(d.n)
    WHERE r.token = d.k AND r.owner = UNHEX(d.o) AND (TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) NOT BETWEEN 0 AND 3600 OR r.expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND) FOR SHARE OF r NOWAIT;
  IF v_held = JSON_LENGTH(p_leases) THEN COMMIT; IF @mysqllock_waits IS NOT NULL THEN SET SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL; END IF; IF p_mark IS NOT NULL THEN SET @mysqllock_done = p_mark; END IF; ELSE SELECT 0; END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_wait2`(p_namespace VARBINARY(255), p_keys LONGTEXT CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4, p_seconds INT UNSIGNED)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_key INT DEFAULT 0;
  DECLARE v_keys JSON DEFAULT p_keys;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN
    ROLLBACK;
    SET SESSION innodb_lock_wait_timeout = COALESCE(@mysqllock_limit, @@SESSION.innodb_lock_wait_timeout), @mysqllock_limit = NULL;
    RESIGNAL;
  END;
  SET @mysqllock_limit = @@SESSION.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = p_seconds, @mysqllock_owner = NULL;
  WHILE v_key < JSON_LENGTH(v_keys) AND @mysqllock_owner IS NULL DO
    SET @mysqllock_token = NULL, @mysqllock_text = CONCAT(_utf8mb4'/* mysqllock ', p_mark, _utf8mb4' */ SELECT token, owner, versioned INTO @mysqllock_token, @mysqllock_owner, @mysqllock_versioned FROM ', _utf8mb4 x'606d7973716c6c6f636b60', _utf8mb4' WHERE namespace = x''', LOWER(HEX(p_namespace)),
      _utf8mb4''' AND name = x''', JSON_UNQUOTE(JSON_EXTRACT(v_keys, CONCAT(_utf8mb4'$[', v_key, _utf8mb4'][0]'))),
      IF(JSON_EXTRACT(v_keys, CONCAT(_utf8mb4'$[', v_key, _utf8mb4'][1]')) = 1, _utf8mb4''' FOR SHARE', _utf8mb4''' FOR UPDATE'));
    PREPARE mysqllock_wait FROM @mysqllock_text;
    EXECUTE mysqllock_wait;
    DEALLOCATE PREPARE mysqllock_wait;
    IF @mysqllock_owner IS NOT NULL THEN ROLLBACK; END IF;
    SELECT CONNECTION_ID(), @mysqllock_token, @mysqllock_owner, @mysqllock_versioned, @@read_only, @@innodb_read_only FROM DUAL WHERE @mysqllock_token IS NOT NULL;
    SET v_key = IF(@mysqllock_token IS NULL, JSON_LENGTH(v_keys), v_key + 1);
  END WHILE;
  SET SESSION innodb_lock_wait_timeout = @mysqllock_limit, @mysqllock_limit = NULL;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_seen2`(p_namespace VARBINARY(255), p_name VARBINARY(255))
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_token BIGINT UNSIGNED;
  SELECT token INTO v_token FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name AND versioned = 1 AND owner IS NULL AND @@transaction_isolation <> 'READ-UNCOMMITTED';
  IF v_token IS NOT NULL THEN START TRANSACTION; SELECT v_token; END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_next3`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_version BIGINT UNSIGNED, p_rows LONGTEXT CHARACTER SET utf8mb4,
  p_mark VARCHAR(64) CHARACTER SET utf8mb4)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_same BOOL;
  IF p_rows IS NULL THEN
    SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ p_version = 0 OR token = p_version AND versioned = 1 AND owner IS NULL INTO v_same
      FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR UPDATE NOWAIT;
    IF v_same THEN UPDATE `mysqllock` SET token = token + 1, expires = UTC_TIMESTAMP(6) WHERE namespace = p_namespace AND name = p_name; END IF;
  ELSE
    INSERT /*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */ INTO `mysqllock` (namespace, name, token, expires)
      SELECT r.namespace, r.name, r.token, r.expires FROM JSON_TABLE(p_rows, _utf8mb4'$[*]' COLUMNS (n VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[0]', v BIGINT UNSIGNED PATH _utf8mb4'$[1]')) d
      STRAIGHT_JOIN `mysqllock` r ON r.namespace = p_namespace AND r.name = UNHEX(d.n)
      WHERE d.v = 0 OR r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE OF r NOWAIT
      ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6);
    SET v_same = ROW_COUNT() = 2 * JSON_LENGTH(p_rows);
  END IF;
  IF v_same THEN COMMIT; IF @mysqllock_waits IS NOT NULL THEN SET SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL; END IF; IF p_mark IS NOT NULL THEN SET @mysqllock_done = p_mark; END IF; ELSE SELECT 0; END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_take1`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_owner VARBINARY(255), p_ttl BIGINT UNSIGNED,
  p_wake VARCHAR(64) CHARACTER SET utf8mb4, p_turn BOOL, p_poller VARCHAR(64) CHARACTER SET utf8mb4, p_level INT, p_reads BOOL)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_token, v_left, v_granted BIGINT UNSIGNED DEFAULT NULL;
  DECLARE v_began DATETIME(6) DEFAULT NOW(6);
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
  START TRANSACTION READ WRITE;
  SELECT token, IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0) INTO v_token, v_left FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR UPDATE SKIP LOCKED;
  IF v_left = 0 AND NOW(6) <> v_began AND (p_poller IS NULL OR IS_FREE_LOCK(p_poller)) THEN
    IF IF(IS_USED_LOCK(p_wake) <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK(p_wake, 0), 0)) OR NOT p_turn THEN
      INSERT INTO `mysqllock` (namespace, name) VALUES (p_namespace, p_name)
       ON DUPLICATE KEY UPDATE token = token + 1, owner = p_owner, expires = UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND;
      SET v_granted = v_token + 1;
    END IF;
  END IF;
  IF v_granted IS NULL THEN ROLLBACK;
  ELSE
    COMMIT;
  CASE p_level
    WHEN 1 THEN SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    WHEN 2 THEN SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    WHEN 4 THEN SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
    WHEN 6 THEN SET TRANSACTION ISOLATION LEVEL SERIALIZABLE;
    ELSE BEGIN END;
  END CASE;
  IF p_reads THEN START TRANSACTION READ ONLY; ELSE START TRANSACTION; END IF;
  END IF;
  SELECT COALESCE(v_granted, 0), COALESCE(v_left, 0);
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_give3`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_token BIGINT UNSIGNED, p_owner VARBINARY(255),
  p_wake VARCHAR(64) CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_held BOOL DEFAULT FALSE;
  SELECT (TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) NOT BETWEEN 0 AND 3600 OR expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND) INTO v_held FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name AND token = p_token AND owner = p_owner FOR UPDATE NOWAIT;
  IF v_held THEN
    UPDATE `mysqllock` SET owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6)) WHERE namespace = p_namespace AND name = p_name;
    COMMIT; IF @mysqllock_waits IS NOT NULL THEN SET SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL; END IF; IF p_mark IS NOT NULL THEN SET @mysqllock_done = p_mark; END IF; 
    DO RELEASE_LOCK(p_wake);
  ELSE SELECT 0;
  END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_held3`(p_held BOOL, p_mark VARCHAR(64) CHARACTER SET utf8mb4, p_lock VARCHAR(64) CHARACTER SET utf8mb4, p_identity VARCHAR(64) CHARACTER SET utf8mb4)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  IF p_mark IS NULL THEN ROLLBACK; IF @mysqllock_waits IS NOT NULL THEN SET SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL; END IF; 
  ELSEIF p_held THEN
    COMMIT; IF @mysqllock_waits IS NOT NULL THEN SET SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL; END IF; IF p_mark IS NOT NULL THEN SET @mysqllock_done = p_mark; END IF; 
    IF p_lock IS NOT NULL THEN DO RELEASE_LOCK(p_lock), RELEASE_LOCK(p_identity); END IF;
  ELSE SELECT 0;
  END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_pass1`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_quiet BIGINT UNSIGNED, p_mark VARCHAR(64) CHARACTER SET utf8mb4)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_quiet BOOL;
  COMMIT;
  SET @mysqllock_done = p_mark;
  BEGIN
    DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;
    START TRANSACTION;
    SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ owner IS NULL AND versioned = 0 AND token <= p_quiet AND CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF') INTO v_quiet
      FROM `mysqllock` WHERE namespace = p_namespace AND name = p_name FOR UPDATE NOWAIT;
  END;
  IF v_quiet IS NOT TRUE THEN ROLLBACK; SELECT 0; END IF;
END//
DELIMITER ;
DELIMITER //
CREATE PROCEDURE `mysqllock_named1`(p_may BOOL, p_lock VARCHAR(64) CHARACTER SET utf8mb4, p_identity VARCHAR(64) CHARACTER SET utf8mb4, p_seconds INT UNSIGNED)
SQL SECURITY INVOKER COMMENT 'mysqllock'
BEGIN
  DECLARE v_got BOOL DEFAULT IF(p_may, GET_LOCK(p_lock, 0), NULL);
  IF v_got THEN
    DO GET_LOCK(p_identity, 0);
    SET @mysqllock_waits = @@SESSION.wait_timeout, SESSION wait_timeout = LEAST(@@SESSION.wait_timeout, p_seconds);
    START TRANSACTION;
  END IF;
  SELECT v_got;
END//
DELIMITER ;
